"""What the tests of drafters share: contexts, a walk down a draft, and a tiny target in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from specdec.attention.reference import AttentionRules, attend
from specdec.draft.base import DraftContext
from specdec.kv.deferred import DeferredWriter
from specdec.kv.pages import PagedKVCache
from specdec.kv.writer import KVWriter
from specdec.sampling import Noise
from specdec.target import LayerShape, Target, TargetOutput
from specdec.types import Draft, Window


def context_of(
    tokens: Sequence[Sequence[int]],
    max_nodes: int | Sequence[int] = 63,
    max_depths: int | Sequence[int] = 63,
    num_generated: int | Sequence[int] = 0,
    rows: Sequence[int] | None = None,
    noise: Noise | None = None,
    temperature: float = 1.0,
) -> DraftContext:
    """A context over given texts; single numbers hold for every row."""
    every = [[n] * len(tokens) if isinstance(n, int) else n for n in (max_nodes, max_depths, num_generated)]
    return DraftContext(
        rows=tuple(range(len(tokens)) if rows is None else rows),
        tokens=tuple(tokens),
        roots=torch.tensor([row[-1] for row in tokens]),
        max_nodes=tuple(every[0]),
        max_depths=tuple(every[1]),
        num_generated=tuple(every[2]),
        temperature=temperature,
        noise=noise,
    )


def paths_of(draft: Draft, row: int = 0) -> list[tuple[int, ...]]:
    """The path of tokens from the root down to each drafted node."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(int(draft.lengths[row])):
        paths.append((*paths[int(draft.parents[row, node])], int(draft.tokens[row, node])))
    return paths[1:]


def accepted_of(draft: Draft, truth: Sequence[int], row: int = 0) -> int:
    """How many tokens of `truth` the draft holds as one path from the root."""
    paths = set(paths_of(draft, row))
    depth = 0
    while tuple(truth[: depth + 1]) in paths and depth < len(truth):
        depth += 1
    return depth


@final
class TinyTarget(Target):
    """One attention layer with random weights; keeps its windows, refuses ids and positions it does not have."""

    def __init__(self, vocab_size: int = 23, max_length: int | None = None, seed: int = 0, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._size = 16
        self._embed = torch.randn(vocab_size, self._size, generator=generator)
        self._place = torch.randn(512, self._size, generator=generator)
        self._qkv = torch.randn(3, self._size, self._size, generator=generator)
        self._head = torch.randn(self._size, vocab_size, generator=generator) * scale
        self._max_length = max_length
        self.forwards: list[Window] = []
        self.fails_at: int | None = None
        self.spoil: float | None = None
        """Stands in place of all logits of the first row."""
        self.forced: dict[int, float] = {}
        """Logits of single ids, everywhere."""

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return (LayerShape(1, self._size, self._size, torch.float32, torch.device("cpu")),)

    @property
    def vocab_size(self) -> int:
        return self._head.shape[1]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def max_length(self) -> int | None:
        return self._max_length

    def forward(
        self, window: Window, writer: KVWriter, taps: tuple[int, ...] = (), need_logits: bool = True
    ) -> TargetOutput:
        exists = torch.arange(window.width) < window.num_nodes[:, None]
        assert int(window.tokens[exists].min()) >= 0 and int(window.tokens[exists].max()) < len(self._embed)
        assert self._max_length is None or int(window.positions[exists].max()) < self._max_length
        if self.fails_at == len(self.forwards):
            raise RuntimeError("the assistant is broken")
        self.forwards.append(window)
        hidden = self._embed[window.tokens] + self._place[window.positions]
        query, k, v = (hidden @ weight for weight in self._qkv)
        view = writer.stage(0, k[:, :, None], v[:, :, None])
        hidden = hidden + 4 * attend(query[:, None], view, window, AttentionRules(self._size**-1)).squeeze(2)
        logits = hidden @ self._head if need_logits else None
        if logits is not None and self.spoil is not None:
            logits[0] = self.spoil
        if logits is not None:
            for token, score in self.forced.items():
                logits[..., token] = score
        return TargetOutput(logits, ())

    def scores(self, tokens: Sequence[int]) -> Tensor:
        """Logits of the token that follows a text, from a fresh cache."""
        cache = PagedKVCache(self.layers, 64)
        cache.add_row()
        writer = DeferredWriter(cache)
        window = Window.chain([list(tokens)], (0,), (0,), self.device)
        writer.begin(window)
        forwards, self.forwards, fails_at, self.fails_at = self.forwards, [], self.fails_at, None
        logits = self.forward(window, writer).logits
        self.forwards, self.fails_at = forwards, fails_at
        assert logits is not None
        return logits[0, -1]

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """Greedy tokens that follow a text."""
        text = list(tokens)
        for _ in range(count):
            text.append(int(self.scores(text).argmax()))
        return text[len(tokens) :]
