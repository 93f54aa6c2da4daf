"""The draft's own K/V (one layer, verified tokens, in pages), and attention over it and the tree being drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.types import PrefixLayout


class DraftPages(Protocol):
    """What the draft needs of a paged cache of one layer (`PagedKVCache` has it)."""

    def add_row(self) -> int: ...
    def length(self, row: int) -> int: ...
    def truncate(self, row: int, length: int) -> None: ...
    def refork(self, source: int, row: int) -> None: ...
    def reserve(self, rows: Sequence[int], num_tokens: Sequence[int]) -> int: ...
    def advance(self, row: int, num_tokens: int) -> None: ...
    def slots(self, row: int, start: int, count: int) -> list[int]: ...
    def layer_pages(self, layer: int) -> tuple[Tensor, Tensor]: ...
    def layout(self, rows: tuple[int, ...], device: torch.device) -> PrefixLayout: ...
    def free_all(self) -> None: ...
    def check(self) -> None: ...


class DraftPrefixes(Protocol):
    """What the draft needs of a store of earlier pages (`PrefixCache` has it), keyed with the successor."""

    def load(self, cache: Any, row: int, tokens: Sequence[int], limit: int) -> int: ...
    def keep(self, cache: Any, row: int, tokens: Sequence[int]) -> None: ...


def append(
    pages: DraftPages,
    rows: Sequence[int],
    counts: Sequence[int],
    k: Float[Tensor, "b w h d"],
    v: Float[Tensor, "b w h d"],
) -> None:
    """Write the first `counts[i]` keys and values of each row behind what the row has."""
    pages.reserve(rows, counts)
    places = [slot for row, n in zip(rows, counts, strict=True) for slot in pages.slots(row, pages.length(row), n)]
    slots = torch.tensor(places, device=k.device)
    exists = torch.arange(k.shape[1], device=k.device) < torch.tensor(counts, device=k.device)[:, None]
    for stored, new in zip(pages.layer_pages(0), (k, v), strict=True):
        stored.flatten(0, 1)[slots] = new[exists].to(stored.dtype)
    for row, count in zip(rows, counts, strict=True):
        pages.advance(row, count)


@dataclass(frozen=True)
class Prefix:
    """Keys and values of the verified pairs, ready for the queries of one draft."""

    k: Float[Tensor, "b h t d"]
    v: Float[Tensor, "b h t d"]
    first: int
    """Position of column 0."""
    lengths: tuple[int, ...]
    """Verified pairs of each row."""
    sliding_window: int | None

    @staticmethod
    def of(pages: DraftPages, rows: tuple[int, ...], device: torch.device, sliding_window: int | None) -> Prefix:
        """Rows whose pages lie one behind the other are looked at in place when they are alone, otherwise copied."""
        layout = pages.layout(rows, device)
        longest = max(layout.host_lengths)
        first = 0 if sliding_window is None else max(0, min(layout.host_lengths) - sliding_window)
        stored = [pool.flatten(0, 1) for pool in pages.layer_pages(0)]
        if len(rows) == 1 and layout.spans is not None:
            start = layout.spans[0]
            k, v = (pool[start + first : start + longest][None] for pool in stored)
        else:
            size = pages.layer_pages(0)[0].shape[1]
            steps = torch.arange(first, longest, device=device)
            slots = layout.page_table.long()[:, steps // size] * size + steps % size
            committed = steps < layout.lengths[:, None]
            k, v = (
                pool[slots.masked_fill(~committed, 0)].masked_fill(~committed[..., None, None], 0) for pool in stored
            )
        return Prefix(k.transpose(1, 2), v.transpose(1, 2), first, layout.host_lengths, sliding_window)

    def hidden_from(self, level: int) -> Bool[Tensor, "b t"] | None:
        """Columns that nodes `level` steps behind the last verified pair do not see; None where they see all."""
        longest = max(self.lengths)
        slides = self.sliding_window is not None and longest + level > self.first + self.sliding_window
        if not slides and min(self.lengths) == longest:
            return None
        steps = torch.arange(self.first, longest, device=self.k.device)
        lengths = torch.tensor(self.lengths, device=self.k.device)[:, None]
        hidden = steps >= lengths
        if self.sliding_window is not None:
            hidden = hidden | (steps < lengths + level - self.sliding_window)
        return hidden


def attend(
    q: Float[Tensor, "b n heads d"],
    prefix: Prefix,
    level: int,
    tree: tuple[Float[Tensor, "b m h d"], Float[Tensor, "b m h d"], Bool[Tensor, "b n m"] | None] | None,
    scaling: float,
) -> Float[Tensor, "b n heads d"]:
    """Attention of draft nodes over the verified pairs and, if given, the tree's keys under a mask; one softmax.

    The query heads of a KV head are further rows of one matrix product, so that K and V are never repeated.
    """
    rows, nodes, heads, size = q.shape
    kv_heads, length = prefix.k.shape[1], prefix.k.shape[2]
    q = (q * scaling).transpose(1, 2).reshape(rows, kv_heads, -1, size)
    scores = q @ prefix.k.transpose(2, 3)
    hidden = prefix.hidden_from(level)
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if tree is None:
        output = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ prefix.v
    else:
        k, v, sees = tree
        among = q @ k.permute(0, 2, 3, 1)
        if sees is not None:
            hidden = ~sees[:, None, None]
            among.view(rows, kv_heads, -1, nodes, k.shape[1]).masked_fill_(hidden, float("-inf"))
        weights = torch.cat([scores, among], dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
        output = weights[..., :length] @ prefix.v + weights[..., length:] @ v.transpose(1, 2)
    return output.view(rows, heads, nodes, size).transpose(1, 2)
