"""`specdec microbench` and `specdec ncu-report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.bench.microbench import Cell, MicrobenchConfig, microbench, profiled
from specdec.bench.microbench_report import as_markdown, figures, write
from specdec.bench.ncu import as_markdown as ncu_markdown
from specdec.bench.ncu import read_ncu_csv
from specdec.bench.provenance import provenance
from specdec.bench.verification import verification_times
from specdec.errors import choose
from specdec.hf.models import DEFAULT_CACHE, DEFAULT_MODEL, load_model
from specdec.hf.progress import LoadingProgress
from specdec.hf.shapes import random_llama

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(hidden=32, inner=48, layers=2, heads=4, kv_heads=2, head_size=8, vocab=256, tied=True),
    "smollm2-135m": dict(hidden=576, inner=1536, layers=30, heads=9, kv_heads=3, head_size=64, vocab=49152, tied=True),
    "llama-3.2-3b": dict(
        hidden=3072, inner=8192, layers=28, heads=24, kv_heads=8, head_size=128, vocab=128256, tied=True
    ),
    "llama-3.1-8b": dict(
        hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, head_size=128, vocab=128256, tied=False
    ),
}
"""Models of random weights: speed does not depend on what weights say."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

DIFFERENT = 1
"""Exit status where a cell's output differs from the first cell's in fp32."""


def microbench_command(
    model: Annotated[str, typer.Option(help="Hub id, model folder or .gguf file.")] = DEFAULT_MODEL,
    shape: Annotated[
        str | None, typer.Option(help=f"Random weights of a model's shape instead: {', '.join(SHAPES)}.")
    ] = None,
    scenario: Annotated[str, typer.Option(help="Prompt lengths: short, medium, long or mixed.")] = "short",
    requests: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Most drafted tokens of a row in one step.")] = 4,
    batches: Annotated[int, typer.Option(min=1, help="Batches that every cell decodes.")] = 5,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 32,
    prompt_count: Annotated[int, typer.Option(min=1, help="Different prompts.")] = 16,
    prompt_seed: Annotated[int, typer.Option(min=0, help="Of prompts, of sampling and of the synthetic drafter.")] = 0,
    writers: Annotated[str, typer.Option(help="Writers, separated by commas.")] = "off,immediate,deferred",
    verifiers: Annotated[
        str, typer.Option(help="Verifiers, separated by commas; adaptive also chooses the number of drafts.")
    ] = "off,vectorized,graph,adaptive",
    drafter: Annotated[str, typer.Option(help="See specdec generate --help.")] = "suffix",
    synthetic_acceptance: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="A synthetic drafter, right with this probability.")
    ] = None,
    siblings: Annotated[int, typer.Option(min=0, help="Wrong siblings of each synthetic draft.")] = 0,
    kv_dtype: Annotated[str | None, typer.Option(help="Quantise pages: fp8_e4m3 or int8.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Batches of every cell before anything is measured.")] = 1,
    profile: Annotated[
        str | None, typer.Option(help="nvtx: ranges and start/stop for Nsight; torch: a trace beside the output.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: as the checkpoint says.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda:0, ...; auto: the first GPU where there is one.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Write figures into this JSON file.")] = None,
    cache_dir: Annotated[Path, typer.Option(help="Where the default model is kept (SPECDEC_CACHE).")] = DEFAULT_CACHE,
) -> None:
    """Measure every writer with every verifier on batches of requests: latency, rows and bytes written, pages held."""
    config = MicrobenchConfig(
        scenario=scenario,
        requests=requests,
        draft_tokens=draft_tokens,
        batches=batches,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        prompt_count=prompt_count,
        prompt_seed=prompt_seed,
        writers=tuple(writers.split(",")),
        verifiers=tuple(verifiers.split(",")),
        drafter=drafter,
        synthetic_acceptance=synthetic_acceptance,
        siblings=siblings,
        warmup=warmup,
        profile=profile,
        kv_dtype=kv_dtype,
    )
    target, tokenizer = load_target(model, shape, dtype, device, cache_dir)
    settings = {
        "model": f"random weights, shape {shape}" if shape else model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
    }
    with profiled(profile, target.device) as profiler:
        cells = run_with_progress(target, tokenizer, config)
    vocab = target.config.get_text_config().vocab_size
    verification = verification_times(requests, draft_tokens, vocab, target.device, target.dtype)
    results = figures(cells)
    console = Console(soft_wrap=True)
    console.print(as_markdown(results, config, settings), markup=False, highlight=False, end="")
    for line in verification:
        on_device = "" if line["device_us"] is None else f", {line['device_us']:.1f} µs of picks and walk on the device"
        console.print(
            f"- verifying by itself, {line['verifier']}: {line['host_us']:.0f} µs{on_device}", highlight=False
        )
    if output is not None:
        path = output.expanduser()
        write(results, config, settings, provenance(target.device), verification, path)
        if profiler is not None:
            profiler.export_chrome_trace(str(path.with_suffix(".trace.json")))
    if target.dtype == torch.float32 and not all(cell.equal for cell in results):
        raise typer.Exit(DIFFERENT)


def load_target(
    model: str, shape: str | None, dtype: str, device: str, cache_dir: Path
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model to measure; random weights come without a tokenizer."""
    if shape is None:
        with LoadingProgress() as progress:
            return load_model(model, dtype, device, cache_dir, on_progress=progress)
    sizes = choose("shape", shape, SHAPES)
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    kind = torch.bfloat16 if dtype == "auto" else choose("dtype", dtype, DTYPES)
    torch.manual_seed(0)
    return random_llama(**sizes, device=torch.device(device), dtype=kind), None


def run_with_progress(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: MicrobenchConfig
) -> list[Cell]:
    """The grid, with a progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = len(config.writers) * len(config.verifiers) * (config.warmup + config.batches)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("microbench", total=total)
        return microbench(model, tokenizer, config, lambda name: progress.update(task, advance=1, description=name))


def ncu_report_command(
    csv: Annotated[Path, typer.Argument(help="What `ncu --csv` printed.")],
    top: Annotated[int, typer.Option(min=1, help="Kernels to list, those that write most first.")] = 20,
) -> None:
    """DRAM and L2 write bytes per kernel, from an Nsight Compute CSV export."""
    Console(soft_wrap=True).print(ncu_markdown(read_ncu_csv(csv), top), markup=False, highlight=False, end="")
