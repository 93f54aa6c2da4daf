"""Measurement: every prompt is decoded by all systems in turn, forwards and backwards, in one process.

The order A B C C B A puts every pair of systems under the same drift of the machine's speed.  Tokens are compared with
those of `model.generate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.bench.systems import HF, System, Trace
from specdec.bench.workload import Question, encode_turn
from specdec.config import require_int, require_number
from specdec.errors import ConfigError
from specdec.stats import SpecStats


@dataclass(frozen=True)
class BenchConfig:
    """How to measure."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    chat: bool = True
    """Use the chat template."""
    max_turns: int = 1
    """Most turns of a question.  Later ones follow the reference's answers, for every system, and are left out where
    the model has no room for them."""
    repeats: int = 2
    """Runs of every prompt by every system; every other pass, over all prompts, goes through the systems backwards."""
    warmup_tokens: int = 16
    """Tokens that every system decodes of the first prompt before anything is measured."""

    def __post_init__(self) -> None:
        require_int("max_new_tokens", self.max_new_tokens, 1, None)
        require_number("temperature", self.temperature, 0.0, 100.0)
        require_int("seed", self.seed, 0, 2**63 - 1)
        require_int("max_turns", self.max_turns, 1, None)
        require_int("repeats", self.repeats, 1, None)
        require_int("warmup_tokens", self.warmup_tokens, 0, None)

    @property
    def picking(self) -> dict[str, Any]:
        """The arguments of `model.generate` that say how tokens are picked."""
        return {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}


@dataclass(frozen=True)
class Divergence:
    """Where a system's tokens part from the reference's."""

    index: int
    """Index of the first generated token that differs."""
    top_2_gap: float
    """Difference of the two largest logits there, by one forward over the common text: 0 is a tie."""


@dataclass(frozen=True)
class RunTimes:
    """What one run took."""

    tokens: int
    seconds: float
    """The whole call, prefill included."""
    decode_tokens: int
    """Tokens behind the first emission."""
    decode_seconds: float
    """From the first emission to the last."""


@dataclass(frozen=True)
class Measurement:
    """One turn decoded by one system, all its runs."""

    question_id: int | str
    category: str
    turn: int
    system: str
    num_prompt_tokens: int
    num_tokens: int
    runs: tuple[RunTimes, ...]
    repeatable: bool
    """All runs gave the same tokens."""
    divergence: Divergence | None
    """None where the tokens are those of the reference."""
    stats: SpecStats | None
    """Sums over the steps of all runs, for systems that have steps."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens over whole time, all runs together."""
        return sum(run.tokens for run in self.runs) / sum(run.seconds for run in self.runs)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens behind the first emission over the time they took; None where the first emission was the last."""
        seconds = sum(run.decode_seconds for run in self.runs)
        return sum(run.decode_tokens for run in self.runs) / seconds if seconds > 0.0 else None


OnRun = Callable[[str], None]
"""Called with a system's name after each of its runs, warm-up not counted."""


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    systems: Sequence[System],
    config: BenchConfig | None = None,
    on_run: OnRun = lambda system: None,
) -> Iterator[Measurement]:
    """Measure all systems on all questions; yields the measurements of a turn as soon as it is done.

    The first system is the reference and must be `hf`.  Before anything is measured, raises `ConfigError` for systems
    with equal names or without the reference, and for questions that leave no room for `max_new_tokens`.
    """
    config = config or BenchConfig()
    names = [system.name for system in systems]
    if not names or names[0] != HF or len(set(names)) < len(names):
        raise ConfigError(f"systems {', '.join(names) or 'none'}; accepted: {HF!r} first, and every name once")
    openings = [encode_turn(tokenizer, question.turns[:1], (), config.chat) for question in questions]
    for question, ids in zip(questions, openings, strict=True):
        if len(ids) + config.max_new_tokens > positions(model):
            raise ConfigError(
                f"question {question.question_id!r}: {len(ids)} prompt tokens and "
                f"max_new_tokens={config.max_new_tokens}; accepted: {positions(model)} together, the model's "
                "max_position_embeddings"
            )
    arguments = {"max_new_tokens": config.max_new_tokens, "pad_token_id": pad_token(model), **config.picking}
    warm_up(systems, as_batch(openings[0], model), config, arguments)
    num_passes = 0
    for question in questions:
        answers: list[str] = []
        for turn in range(min(config.max_turns, len(question.turns))):
            ids = encode_turn(tokenizer, question.turns[: turn + 1], answers, config.chat)
            if len(ids) + config.max_new_tokens > positions(model):
                break
            prompt = as_batch(ids, model)
            traces = interleave(systems, prompt, config, arguments, on_run, num_passes)
            num_passes += config.repeats
            reference = traces[HF][0].tokens
            for name, runs in traces.items():
                yield summarise(model, question, turn, name, prompt, runs, reference)
            answers.append(str(tokenizer.decode(reference, skip_special_tokens=True)))


def as_batch(ids: Sequence[int], model: PreTrainedModel) -> Int[Tensor, "1 t"]:
    """One prompt as a batch on the model's device."""
    return torch.tensor([list(ids)], device=model.device)


def warm_up(
    systems: Sequence[System], prompt: Int[Tensor, "1 t"], config: BenchConfig, arguments: dict[str, Any]
) -> None:
    """Let every system allocate, compile and load what it does once."""
    for system in systems if config.warmup_tokens else ():
        system.decode(prompt, config.seed, {**arguments, "max_new_tokens": config.warmup_tokens})


def interleave(
    systems: Sequence[System],
    prompt: Int[Tensor, "1 t"],
    config: BenchConfig,
    arguments: dict[str, Any],
    on_run: OnRun = lambda system: None,
    num_passes: int = 0,
) -> dict[str, list[Trace]]:
    """Decode one prompt by all systems, `repeats` times; odd passes, counted from `num_passes`, go backwards."""
    traces: dict[str, list[Trace]] = {system.name: [] for system in systems}
    for number in range(num_passes, num_passes + config.repeats):
        for system in systems if number % 2 == 0 else list(reversed(systems)):
            traces[system.name].append(system.decode(prompt, config.seed, arguments))
            on_run(system.name)
    return traces


def summarise(
    model: PreTrainedModel,
    question: Question,
    turn: int,
    system: str,
    prompt: Int[Tensor, "1 t"],
    runs: Sequence[Trace],
    reference: Sequence[int],
) -> Measurement:
    """One system's runs of one turn as a measurement."""
    tokens = runs[0].tokens
    index = first_difference(tokens, reference)
    records = [record for run in runs for record in run.records]
    return Measurement(
        question_id=question.question_id,
        category=question.category,
        turn=turn,
        system=system,
        num_prompt_tokens=prompt.shape[1],
        num_tokens=len(tokens),
        runs=tuple(RunTimes(len(run.tokens), run.seconds, run.decode_tokens, run.decode_seconds) for run in runs),
        repeatable=all(run.tokens == tokens for run in runs),
        divergence=None if index is None else Divergence(index, top_2_gap(model, prompt, tokens[:index])),
        stats=SpecStats.of(records) if records else None,
    )


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side; None where there is none."""
    if list(tokens) == list(reference):
        return None
    pairs = enumerate(zip(tokens, reference, strict=False))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(tokens), len(reference)))


@torch.no_grad()
def top_2_gap(model: PreTrainedModel, prompt: Int[Tensor, "1 t"], tokens: Sequence[int]) -> float:
    """Difference of the two largest logits behind the prompt and `tokens`."""
    text = torch.cat([prompt, torch.tensor([list(tokens)], dtype=torch.long, device=prompt.device)], dim=1)
    first, second = model(input_ids=text, use_cache=False).logits[0, -1].float().topk(2).values.tolist()
    return first - second


def positions(model: PreTrainedModel) -> float:
    """Most tokens of prompt and output together; infinite where the model states no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def pad_token(model: PreTrainedModel) -> int:
    """Any token will do to pad a batch of one; stating it keeps transformers from warning."""
    pad = model.generation_config.pad_token_id
    return 0 if pad is None else pad
