"""Random windows with logits that agree with some of their drafts: what verifiers are compared on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.sampling import GeneratorNoise, Noise, Sampler, pick_or_flag
from specdec.types import Draft, Verdict, Window
from specdec.verify.base import Verifier
from specdec.verify.walk import noise_at_nodes

VOCAB = 13


@dataclass
class Case:
    """One window to verify, and how to make a fresh sampler for it."""

    window: Window
    logits: Tensor
    make_sampler: Callable[[], Sampler]

    def run(self, verifier: Verifier) -> dict[str, Any]:
        """Verdict and pending tokens on the host, what is behind `num_kept` left out."""
        sampler = self.make_sampler()
        verdict = verifier.verify(self.logits.clone(), self.window, sampler)
        before = [len(tokens) for tokens in sampler.emitted]
        sampler.settle()
        pending = [tokens[n:] for tokens, n in zip(sampler.emitted, before, strict=True)]
        return {**as_lists(verdict), "emitted": verdict.emitted(self.window), "pending": pending}


def as_lists(verdict: Verdict) -> dict[str, Any]:
    """A verdict on the host."""
    kept = verdict.num_kept.tolist()
    for row, count in zip(verdict.path.tolist(), kept, strict=True):
        assert all(node == -1 for node in row[count:]), "behind num_kept the path must hold -1"
    return {
        "paths": [path[:count] for path, count in zip(verdict.path.tolist(), kept, strict=True)],
        "next": verdict.next_tokens.tolist(),
        "stopped": verdict.stopped.tolist(),
    }


def random_case(
    seed: int,
    num_rows: int,
    num_drafts: int,
    *,
    agreement: float = 0.7,
    chain: bool = False,
    sampled: bool = False,
    processors: Sequence[Any] = (),
    criteria: Sequence[Any] = (),
    history: int = 0,
    **sampler_options: Any,
) -> Case:
    """A window of ragged random trees (or chains) of up to `num_drafts` nodes, some rows without any.

    `agreement` is the chance that a node bears the token that the target picks at its parent, where no sibling has it.
    `history` is the most tokens that a row has already emitted.
    """
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=random))

    logits = torch.randn(num_rows, num_drafts + 1, VOCAB, generator=random)
    emitted = [[number(0, VOCAB - 1) for _ in range(number(0, history))] for _ in range(num_rows)]
    noise = GeneratorNoise(random.get_state(), num_rows, VOCAB, torch.device("cpu")) if sampled else None

    def make_sampler() -> Sampler:
        prompts = torch.zeros(num_rows, 1, dtype=torch.long)
        sampler = Sampler(prompts, processors, criteria, noise, **sampler_options)
        for row, tokens in enumerate(emitted):
            for token in tokens:
                sampler.push([row], [token])
        sampler.settle()
        sampler.done = [False] * num_rows
        sampler.rollback()
        return sampler

    shapes = [shape(number(0, num_drafts), chain, number) for _ in range(num_rows)]
    bare = Window.over(
        torch.zeros(num_rows, dtype=torch.long),
        Draft.trees([[(0, parent) for parent in row] for row in shapes]),
        tuple(range(num_rows)),
        (0,) * num_rows,
    )
    logits = logits[:, : bare.width].contiguous()
    picks = pick_or_flag(logits, noise_at_nodes(bare, make_sampler())).tolist()
    rows = [with_tokens(row, picks[i], agreement, random, number) for i, row in enumerate(shapes)]
    window = Window.over(torch.zeros(num_rows, dtype=torch.long), Draft.trees(rows), bare.rows, bare.context_lengths)
    return Case(window, logits, make_sampler)


def shape(num_nodes: int, chain: bool, number: Callable[[int, int], int]) -> list[int]:
    """Parents of the drafted nodes; at most `VOCAB - 1` children each."""
    parents: list[int] = []
    for node in range(num_nodes):
        parent = node if chain else number(max(0, node - 4), node)
        if parents.count(parent) < VOCAB - 1:
            parents.append(parent)
        else:
            parents.append(node)
    return parents


def with_tokens(
    parents: list[int], picks: list[int], agreement: float, random: torch.Generator, number: Callable[[int, int], int]
) -> list[tuple[int, int]]:
    """Give each node the pick of its parent, or any token that no sibling bears."""
    taken: set[tuple[int, int]] = set()
    nodes = []
    for parent in parents:
        token = picks[parent] if float(torch.rand(1, generator=random)) < agreement else number(0, VOCAB - 1)
        while (parent, token) in taken:
            token = (token + 1) % VOCAB
        taken.add((parent, token))
        nodes.append((token, parent))
    return nodes


class FixedNoise(Noise):
    """The same variates for every index."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def at(self, index: int) -> Tensor:
        return self._values


def stops_at(*tokens: int) -> Callable[[Tensor, Any], Tensor]:
    """A criterion that ends a row with any of these tokens."""
    wanted = torch.tensor(tokens)
    return lambda ids, scores: torch.isin(ids[:, -1], wanted)


def temperature(value: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A processor that is a pure function of the scores."""
    return lambda ids, scores: scores / value
