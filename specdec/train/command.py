"""`specdec train`: a draft head for any model, from text that the model writes itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, final

import torch
import typer
from accelerate import PartialState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.bench.acceptance import CHAINS, measure, trees
from specdec.bench.provenance import provenance
from specdec.bench.workload import encode_turn, read_questions
from specdec.draft.eagle_head import EagleHead
from specdec.errors import ConfigError
from specdec.hf.checkpoint_export import Verifier
from specdec.hf.checkpoints import save_head
from specdec.hf.initial_head import HeadShape
from specdec.hf.models import DEFAULT_CACHE, DEFAULT_MODEL, load_model
from specdec.hf.progress import LoadingProgress
from specdec.hf.target import HFTarget
from specdec.hf.teacher import TeacherModel
from specdec.hf.tiny import tiny_model
from specdec.train.acceptance import Tau
from specdec.train.data import Corpus
from specdec.train.eagle import TestTimeTraining
from specdec.train.optimise import OptimiserConfig
from specdec.train.pipeline import Place, TrainConfig, TrainingRun, held_out_texts
from specdec.train.progress import Lines, Progress, Silent
from specdec.train.report import CARD, PLOT, model_card, plot_history, write_figures
from specdec.train.selftalk import SelfTalkConfig

WORK = "work"
"""Folder below `--out` with the text and the state that a killed run goes on from."""


def train_command(
    model: Annotated[str, typer.Argument(help="Hub id, model folder or .gguf file.")] = DEFAULT_MODEL,
    out: Annotated[Path, typer.Option(help="Folder for the head; the same command goes on from what it holds.")] = Path(
        "head"
    ),
    prompts: Annotated[
        Path | None, typer.Option(help="Answer these prompts (JSON lines with turns) instead of self-written ones.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Text to write, in tokens.")] = 45_000_000,
    epochs: Annotated[float, typer.Option(help="Passes over the text, at most.")] = 4.0,
    minutes: Annotated[float | None, typer.Option(help="Wall time for everything; text and passes are cut.")] = None,
    length: Annotated[int, typer.Option(min=16, help="Tokens of a row of text.")] = 320,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows written at once.  Default: what memory allows.")] = None,
    batch_rows: Annotated[int | None, typer.Option(min=1, help="Rows of a batch.  Default: 8k tokens.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak of the cosine schedule.")] = 3e-3,
    steps: Annotated[int, typer.Option(min=1, max=16, help="Unrolled steps of training-time test.")] = 5,
    sharpness: Annotated[float, typer.Option(help="Exponent on the target's distribution; 1 suits sampling.")] = 1.5,
    taps: Annotated[str | None, typer.Option(help="Layers to read, as 2,15,27.  Default: five, evenly spread.")] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens the head can draft; 0: all.  Default: all up to 65536, else 32000."),
    ] = None,
    mlp_multiple: Annotated[float, typer.Option(help="Width of the head's MLP, relative to the target's.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text and same loss curve.")] = 0,
    compiled: Annotated[bool, typer.Option("--compile", help="Fuse the target's layers with torch.compile.")] = False,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Store the target's embedding and lm_head too, for other engines.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16; auto: bf16 on a GPU.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda:0, ...; auto: the first GPU where there is one.")] = "auto",
    tiny: Annotated[
        bool, typer.Option("--tiny", help="The whole pipeline on a tiny random model, in a minute.")
    ] = False,
    cache_dir: Annotated[Path, typer.Option(help="Where the default model is kept (SPECDEC_CACHE).")] = DEFAULT_CACHE,
) -> None:
    """Train an EAGLE-3 draft head; several GPUs with `accelerate launch -m specdec train ...`."""
    processes = PartialState(cpu=device == "cpu")
    if processes.num_processes > 1:
        device = str(processes.device)
    if tiny:
        target, tokenizer = tiny_model()
        model, config = "the tiny model", tiny_config(seed, minutes)
    else:
        with LoadingProgress() as loading:
            target, tokenizer = load_model(model, dtype, device, cache_dir, on_progress=loading)
        if dtype == "auto" and target.device.type == "cuda":
            target.to(torch.bfloat16)  # type: ignore[arg-type]
        config = TrainConfig(
            tokens=tokens,
            epochs=epochs,
            minutes=minutes,
            rows_at_once=rows or rows_that_fit(target, length),
            batch_rows=batch_rows or max(1, round(8192 / length)),
            seed=seed,
            compiled=compiled,
            talk=SelfTalkConfig(length=length, max_user_tokens=min(120, length // 2)),
            recipe=TestTimeTraining(steps=steps, sharpness=sharpness),
            optimiser=OptimiserConfig(learning_rate=learning_rate),
            shape=HeadShape(
                taps=None if taps is None else parse_taps(taps), mlp_multiple=mlp_multiple, draft_vocab_size=draft_vocab
            ),
        )
    target.requires_grad_(False)
    place = Place(target.device, processes.process_index, processes.num_processes)
    with shown_progress(place) as progress:
        train(target, tokenizer, model, out.expanduser(), config, progress, place, prompts, standalone)


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    out: Path,
    config: TrainConfig,
    progress: Progress,
    place: Place,
    prompts: Path | None = None,
    standalone: bool = False,
) -> None:
    """Write text, train, measure, and leave a head with its card in `out`; goes on from what `out` holds."""
    run = TrainingRun(model, tokenizer, out / WORK, config, progress, place)
    chat = bool(tokenizer.chat_template)
    asked = (
        None if prompts is None else [encode_turn(tokenizer, q.turns[:1], [], chat) for q in read_questions(prompts)]
    )
    run.write_text(asked)
    head, state, corpus = run.train()
    if place.rank != 0:
        return
    taus = held_out_taus(model, head, corpus, config, progress)
    facts: dict[str, Any] = {
        "model": name,
        "source": "The target wrote the training text itself" if prompts is None else f"Replies to {prompts.name}",
        "text_tokens": corpus.num_tokens,
        "train_seconds": round(state.seconds, 1),
        "provenance": provenance(place.device),
    }
    head.set_token_order(corpus.frequencies(head.config.vocab_size).argsort(descending=True, stable=True).cpu())
    # Attention over more pairs than it was trained on makes a head guess wildly.
    head.config = replace(head.config, sliding_window=config.shape.sliding_window or config.talk.length * 4 // 5)
    verifier = Verifier(model.config.name_or_path or None, tuple(model.config.architectures or ()))
    save_head(head, out, verifier=verifier, standalone=standalone)
    write_figures(out, config, state.history, taus, facts)
    (out / CARD).write_text(model_card(name, head, config, state.history, taus, facts), encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        progress.say("no plot: matplotlib is not installed (pip install 'specdec-torch[plot]')")
    else:
        plot_history(out / PLOT, state.history, f"EAGLE-3 head for {name}")
    best = max(taus.items(), key=lambda item: item[1].tau)
    progress.say(f"head in {out}; held-out tau of {best[0]}: {best[1].tau:.2f}")


def held_out_taus(
    model: PreTrainedModel, head: EagleHead, corpus: Corpus, config: TrainConfig, progress: Progress
) -> dict[str, Tau]:
    """τ of chains and trees along the first replies of held-out rows."""
    teacher = TeacherModel(model, head.config.taps, config.talk.length)
    texts = list(held_out_texts(corpus, teacher, config.batch_rows))[:2]
    settings = [*CHAINS, *trees()]
    progress.phase("Measuring held-out acceptance (settings)", len(settings))
    names: list[str] = []

    def on_setting(setting: str) -> None:
        names.append(setting)
        progress.advance(len(names))

    return measure(head, texts, settings, on_setting)


def parse_taps(text: str) -> tuple[int, ...]:
    """Layer numbers from `2,15,27`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as failure:
        raise ConfigError(f"taps={text!r}; accepted: layer numbers separated by commas, as 2,15,27") from failure


def rows_that_fit(model: PreTrainedModel, length: int) -> int:
    """Rows whose K/V take under half of the free GPU memory; few on a CPU."""
    if model.device.type != "cuda":
        return 16
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(16, min(8192, int(free * 0.45) // (length * HFTarget(model).profile.bytes_per_token)))


def tiny_config(seed: int = 0, minutes: float | None = None) -> TrainConfig:
    """A run of seconds."""
    small = TrainConfig(
        tokens=6144, rows_at_once=32, epochs=3, batch_rows=8, held_out_rows=8, seed=seed, minutes=minutes
    )
    talk = SelfTalkConfig(length=96, max_user_tokens=24, max_reply_tokens=64)
    return replace(small, talk=talk, log_every=2, look_every=8, recipe=TestTimeTraining(steps=3))


def shown_progress(place: Place) -> ShownProgress:
    """Bars on a terminal, lines elsewhere, nothing in all but the first process."""
    return ShownProgress(Silent() if place.rank else None)


@final
class ShownProgress(Progress):
    """Bars where standard error is a terminal, lines elsewhere."""

    def __init__(self, instead: Progress | None = None) -> None:
        console = Console(stderr=True)
        columns: Sequence[Any] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bars = Bars(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console
        )
        self._instead = instead or (None if console.is_terminal else Lines())
        self._task: Any = None

    def __enter__(self) -> ShownProgress:
        if self._instead is None:
            self._bars.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bars.stop()

    def phase(self, name: str, total: int, done: int = 0) -> None:
        if self._instead is not None:
            return self._instead.phase(name, total, done)
        self._task = self._bars.add_task(name, total=total, completed=done, note="")

    def advance(self, done: int, note: str = "") -> None:
        if self._instead is not None:
            return self._instead.advance(done, note)
        self._bars.update(self._task, completed=done, note=note)

    def say(self, text: str) -> None:
        if self._instead is not None:
            return self._instead.say(text)
        self._bars.console.print(text, highlight=False, markup=False)
