"""`specdec bench`: several ways of decoding on a file of questions, measured in turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.bench.measure import BenchConfig, measure
from specdec.bench.provenance import provenance
from specdec.bench.report import Report, as_markdown, write
from specdec.bench.systems import PLAIN, HFSystem, SpecdecSystem, System
from specdec.bench.workload import Question, copying_questions, read_questions
from specdec.errors import ConfigError
from specdec.hf.drafters import make_drafter
from specdec.hf.models import DEFAULT_CACHE, DEFAULT_MODEL, load_model
from specdec.hf.progress import LoadingProgress

DIFFERENT = 1
"""Exit status where tokens differ from the reference's and must not."""


def bench_command(
    prompts: Annotated[
        Path | None, typer.Option(help="Questions in Spec-Bench's format, one JSON object a line.", show_default=False)
    ] = None,
    copy_task: Annotated[
        int, typer.Option(min=0, help="Add so many tasks: repeat a passage of 200 tokens with one word changed.")
    ] = 0,
    model: Annotated[str, typer.Option(help="Hub id, model folder or .gguf file.")] = DEFAULT_MODEL,
    drafter: Annotated[
        list[str], typer.Option(help="A drafter to measure, see specdec generate --help; may be given several times.")
    ] = ["suffix"],  # noqa: B006 (typer copies it)
    hf_lookup: Annotated[
        int | None, typer.Option(min=1, help="Measure model.generate's prompt lookup too, with so many tokens.")
    ] = None,
    hf_assistant: Annotated[
        str | None, typer.Option(help="Measure model.generate's assisted generation too, with this model.")
    ] = None,
    writer: Annotated[str, typer.Option(help="deferred or direct (SPECDEC_KV_WRITER).")] = "deferred",
    verifier: Annotated[str, typer.Option(help="See specdec generate --help.")] = "eager",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Most turns of a question.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling, and of the bootstrap.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every question; every other pass in reverse order.")] = 2,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: as the checkpoint says.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda:0, ...; auto: the first GPU where there is one.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU.  Default: what torch takes.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the chat template.")] = True,
    output: Annotated[Path | None, typer.Option(help="Write report.json and report.md into this folder.")] = None,
    cache_dir: Annotated[Path, typer.Option(help="Where the default model is kept (SPECDEC_CACHE).")] = DEFAULT_CACHE,
) -> None:
    """Measure speed and acceptance of drafters against model.generate() and plain decoding."""
    if prompts is None and not copy_task:
        raise ConfigError("nothing to measure; give --prompts FILE.jsonl, --copy-task N, or both")
    questions = [] if prompts is None else read_questions(prompts, limit)
    config = BenchConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        chat=chat,
        max_turns=turns,
        repeats=repeats,
    )
    if threads is not None:
        torch.set_num_threads(threads)
    with LoadingProgress() as progress:
        target, tokenizer = load_model(model, dtype, device, cache_dir, on_progress=progress)
    if copy_task:
        questions += copying_questions(tokenizer, copy_task, seed=seed)
    systems: list[System] = [HFSystem(target)]
    for name in dict.fromkeys([PLAIN, *drafter]):
        systems.append(SpecdecSystem(target, make_drafter(name, target), name, writer, verifier))
    if hf_lookup is not None:
        systems.append(HFSystem(target, f"hf lookup {hf_lookup}", prompt_lookup_num_tokens=hf_lookup))
    if hf_assistant is not None:
        assistant, _ = load_model(hf_assistant, dtype, device, cache_dir)
        systems.append(HFSystem(target, f"hf assisted {Path(hf_assistant).name}", assistant_model=assistant))
    settings = {
        "model": model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "prompts": None if prompts is None else prompts.name,
        "limit": limit,
        "copy_task": copy_task,
        "writer": writer,
        "verifier": verifier,
    }
    report = run(target, tokenizer, questions, systems, config, settings)
    Console(soft_wrap=True).print(as_markdown(report), markup=False, highlight=False, end="")
    if output is not None:
        for path in write(report, output.expanduser()):
            Console(stderr=True, soft_wrap=True).print(f"wrote {path}", highlight=False)
    if report.wrong:
        raise typer.Exit(DIFFERENT)


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    systems: Sequence[System],
    config: BenchConfig,
    settings: dict,
) -> Report:
    """Measure with a progress bar on standard error."""
    origin = provenance(model.device)
    turns = sum(min(config.max_turns, len(question.turns)) for question in questions)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=turns * len(systems) * config.repeats)

        def advance(system: str) -> None:
            progress.update(task, advance=1, description=system)

        measured = tuple(measure(model, tokenizer, questions, systems, config, advance))
    return Report(settings, config, origin, measured)
