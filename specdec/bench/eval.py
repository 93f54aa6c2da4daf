"""`specdec eval`: how many of a head's drafts a model accepts, in every setting, and which one pays on this machine."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.bench.acceptance import CHAINS, Setting, measure, replies, texts_of, trees
from specdec.bench.provenance import provenance
from specdec.bench.report import table
from specdec.bench.workload import encode_turn, read_questions
from specdec.draft.base import Drafter
from specdec.draft.eagle import EagleDraftConfig
from specdec.draft.eagle_head import EagleHead
from specdec.draft.none import NoDrafter
from specdec.hf.checkpoints import load_head
from specdec.hf.eagle import eagle_drafter, lendable_weights, shipped_head, target_shape
from specdec.hf.generate import generate
from specdec.hf.models import DEFAULT_CACHE, DEFAULT_MODEL, load_model
from specdec.hf.progress import LoadingProgress
from specdec.hf.teacher import TeacherModel
from specdec.train.acceptance import Tau
from specdec.train.pipeline import pick_for
from specdec.train.report import tau_entry
from specdec.train.selftalk import end_of_turn_ids
from specdec.types import StepRecord

TIMED_TOKENS = 32
SHIPPED = "shipped"
ENGINES = torch.backends.quantized.supported_engines


@dataclass(frozen=True)
class Line:
    """One setting, measured."""

    setting: Setting
    greedy: Tau
    sampled: Tau
    step_ms: float | None = None
    """Median wall time of one whole step (ms)."""
    plain_ms: float | None = None
    """The same for a step of plain decoding."""

    @property
    def speedup(self) -> float | None:
        """Greedy tokens per second over those of plain decoding, by the two times and τ."""
        return None if not self.step_ms or not self.plain_ms else self.greedy.tau * self.plain_ms / self.step_ms


def eval_command(
    head: Annotated[
        str, typer.Argument(help="A head's folder or Hub id; 'shipped': the one that comes with the model.")
    ],
    prompts: Annotated[Path, typer.Option(help="Questions in Spec-Bench's format, one JSON object a line.")],
    model: Annotated[str, typer.Option(help="Hub id, model folder or .gguf file.")] = DEFAULT_MODEL,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
    depth: Annotated[int, typer.Option(min=1, help="Levels of the trees.")] = 6,
    top_k: Annotated[int, typer.Option(min=1, help="Nodes run and children taken at each level of the trees.")] = 8,
    int8: Annotated[
        bool | None, typer.Option("--int8/--no-int8", help="Time with lm_head rounded to int8.  Default: on a CPU.")
    ] = None,
    time: Annotated[bool, typer.Option("--time/--no-time", help="Time every setting and recommend one.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: as the checkpoint says.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda:0, ...; auto: the first GPU where there is one.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU.  Default: what torch takes.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write eval.json and eval.png into this folder.")] = None,
    cache_dir: Annotated[Path, typer.Option(help="Where the default model is kept (SPECDEC_CACHE).")] = DEFAULT_CACHE,
) -> None:
    """Measure a draft head: τ and acceptance by position for chains and trees, greedy and at temperature 1."""
    if threads is not None:
        torch.set_num_threads(threads)
    questions = read_questions(prompts, limit)
    with LoadingProgress() as loading:
        target, tokenizer = load_model(model, dtype, device, cache_dir, on_progress=loading)
    folder = shipped_head(target) if head == SHIPPED else head
    weights = load_head(folder, target_shape(target), dtype=target.dtype, device=target.device)
    weights.borrow(*lendable_weights(target))
    asked = [encode_turn(tokenizer, q.turns[:1], [], bool(tokenizer.chat_template)) for q in questions]
    settings = (*CHAINS, *trees(depth=depth, top_k=top_k))
    rounded = int8 if int8 is not None else target.device.type == "cpu" and "onednn" in ENGINES
    lines = evaluate(target, tokenizer, weights, asked, settings, max_new_tokens, time, seed, rounded)
    Console(soft_wrap=True).print(as_text(lines), markup=False, highlight=False)
    if time and rounded:
        Console(soft_wrap=True).print("Timed with int8_lm_head=True; acceptance is the exact head's.", highlight=False)
    if output is not None:
        facts = {"head": head, "model": model, "prompts": prompts.name, "limit": limit, "timed_with_int8": rounded}
        write(lines, output.expanduser(), facts)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    head: EagleHead,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Setting],
    max_new_tokens: int = 128,
    timed: bool = True,
    seed: int = 0,
    int8_lm_head: bool = False,
) -> list[Line]:
    """Let the model answer greedily and at temperature 1, and measure every setting along both.

    At temperature 1 drafts are ranked by the head's probabilities; a drafter that follows the noise has more accepted.
    """
    eos = model.generation_config.eos_token_id
    ends = end_of_turn_ids(None, tokenizer.eos_token_id if eos is None else eos, ())
    teacher = TeacherModel(model, head.config.taps, max(map(len, prompts)) + max_new_tokens)
    found: dict[float, dict[str, Tau]] = {}
    with Progress(console=Console(stderr=True), transient=True) as bars:
        for temperature in (0.0, 1.0):
            task = bars.add_task(f"answers at temperature {temperature:g}", total=len(prompts))
            texts = []
            for rows in replies(model, prompts, ends, pick_for(model.device), max_new_tokens, temperature, seed):
                texts += list(texts_of(rows, teacher))
                bars.advance(task, len(rows.tokens))
            task = bars.add_task(f"acceptance at temperature {temperature:g}", total=len(settings))
            found[temperature] = measure(head, texts, settings, lambda name, task=task: bars.advance(task))  # type: ignore[misc]
        plain = step_time(model, NoDrafter(), prompts) if timed else None
        task = bars.add_task("times", total=len(settings), visible=timed)
        lines = []
        for setting in settings:
            step = step_time(model, drafter_of(head, model, setting, int8_lm_head), prompts) if timed else None
            lines.append(Line(setting, found[0.0][setting.name], found[1.0][setting.name], step, plain))
            bars.advance(task)
    return lines


def drafter_of(head: EagleHead, model: PreTrainedModel, setting: Setting, int8_lm_head: bool = False) -> Drafter:
    """The drafter that a setting describes."""
    nodes = setting.depth if setting.size is None else setting.size - 1
    shape = EagleDraftConfig(width=setting.top_k, depth=setting.depth, nodes=nodes, int8_lm_head=int8_lm_head)
    return eagle_drafter(head, model, shape)


def step_time(model: PreTrainedModel, drafter: Drafter, prompts: Sequence[Sequence[int]]) -> float:
    """Median wall time of whole decoding steps over two prompts (ms), prefills left out."""
    times: list[float] = []
    for prompt in prompts[:2]:
        records: list[StepRecord] = []
        inputs = torch.tensor([list(prompt)], device=model.device)
        generate(model, inputs, drafter=drafter, max_new_tokens=TIMED_TOKENS, do_sample=False, on_step=records.append)
        times += [sum(record.timings_ms.values()) for record in records[1:]]
    return median(times)


def recommended(lines: Sequence[Line]) -> Line | None:
    """The fastest timed setting; None where plain decoding is at least as fast."""
    timed = [line for line in lines if line.speedup is not None]
    best = max(timed, key=lambda line: line.speedup or 0.0, default=None)
    return best if best is not None and (best.speedup or 0.0) > 1.0 else None


def as_text(lines: Sequence[Line]) -> str:
    """The table, and the recommendation where times were taken."""
    rows = [
        [
            line.setting.name,
            f"{line.greedy.tau:.2f}",
            f"{line.sampled.tau:.2f}",
            "" if line.step_ms is None else f"{line.step_ms:.1f}",
            "" if line.speedup is None else f"{line.speedup:.2f}",
            " ".join(f"{rate:.2f}" for rate in line.greedy.by_position),
        ]
        for line in lines
    ]
    text = table(("drafts", "τ, T = 0", "τ, T = 1", "step, ms", "speed-up", "acceptance by position, T = 0"), rows)
    if lines[0].plain_ms is None:
        return text
    best = recommended(lines)
    if best is None:
        return f"{text}\n\nRecommended here: no drafts; no setting is faster than plain decoding."
    width, depth = best.setting.top_k, best.setting.depth
    nodes = depth if best.setting.size is None else best.setting.size - 1
    return (
        f"{text}\n\nA step of plain decoding takes {best.plain_ms:.1f} ms.  Recommended here: {best.setting.name} "
        f"(width {width}, depth {depth}, {nodes} nodes), {best.speedup:.2f} times the speed of plain decoding."
    )


def write(lines: Sequence[Line], folder: Path, facts: dict[str, Any]) -> None:
    """Figures as JSON, and a plot where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    best = recommended(lines)
    entries = {
        line.setting.name: {
            "greedy": tau_entry(line.greedy),
            "sampled": tau_entry(line.sampled),
            "step_ms": line.step_ms,
            "plain_ms": line.plain_ms,
            "speedup": line.speedup,
        }
        for line in lines
    }
    figures = {
        "facts": facts,
        "provenance": provenance(torch.device("cpu")),
        "settings": entries,
        "recommended": None if best is None else best.setting.name,
    }
    (folder / "eval.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        Console(stderr=True).print("no figure: matplotlib is not installed (pip install 'specdec-torch[plot]')")
        return
    plot(folder / "eval.png", lines)


def plot(path: Path, lines: Sequence[Line]) -> None:
    """τ of every setting, and acceptance by position of the deepest chain."""
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(11, 4), layout="constrained")
    for_tau, for_positions = figure.subplots(1, 2)
    names = [line.setting.name for line in lines]
    for label, taus in (("T = 0", [x.greedy.tau for x in lines]), ("T = 1", [x.sampled.tau for x in lines])):
        for_tau.plot(names, taus, "o-", label=label)
    for_tau.tick_params(axis="x", rotation=60)
    for_tau.set(ylabel="τ (tokens per target forward)")
    chains = [line for line in lines if line.setting.size is None]
    if chains:
        deepest = max(chains, key=lambda line: line.setting.depth)
        for label, tau in (("T = 0", deepest.greedy), ("T = 1", deepest.sampled)):
            for_positions.plot(range(1, len(tau.by_position) + 1), tau.by_position, "o-", label=label)
        for_positions.set(xlabel="draft position", ylabel="accepted, given the ones before", ylim=(0, 1))
    for axes in (for_tau, for_positions):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
