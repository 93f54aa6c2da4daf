"""What the contract tests are run over: every writer, verifier and kind of draft, and two ways of running a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import specdec
from specdec import Drafter, KVWriter, PagedKVCache, StepRecord
from specdec.draft.ngram import NGramDrafter
from specdec.draft.none import NoDrafter
from specdec.draft.scripted import ScriptedDrafter, SyntheticDrafter
from specdec.draft.suffix import SuffixDrafter
from specdec.policies import VERIFIERS as NAMED_VERIFIERS
from specdec.policies import WRITERS as NAMED_WRITERS

WRITERS = {name: make for name, make in NAMED_WRITERS.items() if name != "off"}
VERIFIERS = {name: make for name, make in NAMED_VERIFIERS.items() if name != "off"}

MakeDrafter = Callable[[list[list[int]], int], Drafter]
"""`(true continuation of each row, vocabulary size) → drafter`."""

DRAFTERS: dict[str, MakeDrafter] = {
    "none": lambda truth, vocab: NoDrafter(),
    "ngram": lambda truth, vocab: NGramDrafter(),
    "suffix": lambda truth, vocab: SuffixDrafter(),
    "right": lambda truth, vocab: ScriptedDrafter(truth, vocab, depth=5),
    "wrong": lambda truth, vocab: ScriptedDrafter(truth, vocab, depth=4, wrong_depths=(1,)),
    "late-wrong-tree": lambda truth, vocab: ScriptedDrafter(truth, vocab, depth=6, wrong_depths=(4,), siblings=2),
    "mixed-tree": lambda truth, vocab: SyntheticDrafter(truth, vocab, acceptance=0.7, depth=7, siblings=1),
}

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95}


@dataclass
class Recorder:
    """A writer factory that remembers the caches it was given, and the records of a run."""

    writer: str = "deferred"
    prepare: Callable[[PagedKVCache], None] = lambda cache: None
    caches: list[PagedKVCache] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)

    def __call__(self, cache: PagedKVCache) -> KVWriter:
        self.prepare(cache)
        self.caches.append(cache)
        return WRITERS[self.writer](cache)


def prompts(num_rows: int, vocab: int, seed: int = 0, length: int = 9) -> dict[str, Tensor]:
    """Random left-padded prompts of unequal lengths: `length`, then shorter ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (num_rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, num_rows):
        padding = (3 * row) % length
        ids[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def plain(model: PreTrainedModel, inputs: dict[str, Tensor], seed: int = 0, **options: Any) -> Any:
    """`model.generate` from a fixed seed."""
    torch.manual_seed(seed)
    return model.generate(**inputs, **{"pad_token_id": 0, **options})


def continuation(model: PreTrainedModel, inputs: dict[str, Tensor], seed: int = 0, **options: Any) -> list[list[int]]:
    """What `model.generate` appends to each prompt."""
    return plain(model, inputs, seed, **options)[:, inputs["input_ids"].shape[1] :].tolist()


def speculative(model: PreTrainedModel, inputs: dict[str, Tensor], drafter: Any, seed: int = 0, **options: Any) -> Any:
    """`specdec.generate` from a fixed seed."""
    torch.manual_seed(seed)
    return specdec.generate(model, **inputs, drafter=drafter, **{"pad_token_id": 0, **options})


__all__ = [
    "DRAFTERS",
    "GREEDY",
    "SAMPLED",
    "VERIFIERS",
    "WRITERS",
    "MakeDrafter",
    "Recorder",
    "continuation",
    "plain",
    "prompts",
    "speculative",
]
