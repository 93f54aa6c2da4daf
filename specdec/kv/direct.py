"""The classic design, kept as baseline: every staged row is written at once, kept rows of a tree are moved
afterwards."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.errors import WindowError
from specdec.kv.pages import PagedKVCache
from specdec.kv.staging import Staging
from specdec.kv.writer import KVWriter
from specdec.types import CommitStats, KVView, Verdict, Window


@final
class DirectWriter(KVWriter):
    """Writes all staged rows into the pages behind each row's end, then compacts the kept rows of a tree."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._open: Staging | None = None
        self._slots = torch.empty(0, dtype=torch.long)
        self._sources = torch.empty(0, dtype=torch.long)
        self._bytes_copied = 0

    def begin(self, window: Window) -> None:
        if self._open is not None:
            raise WindowError("begin while a window is open; commit or abort it first")
        num_nodes = window.num_nodes.tolist()
        self._bytes_copied = self._cache.reserve(window.rows, num_nodes)
        self._open = Staging(self._cache, window)
        self._slots = self._open.destination_slots(num_nodes)
        flat = [i * window.width + node for i, count in enumerate(num_nodes) for node in range(count)]
        self._sources = torch.tensor(flat, dtype=torch.long)

    def stage(self, layer: int, k: Float[Tensor, "b w h dk"], v: Float[Tensor, "b w h dv"]) -> KVView:
        if self._open is None:
            raise WindowError("stage without begin")
        view = self._open.put(layer, k, v)
        for pages, rows in self._open.staged(layer):
            pages.flatten(0, 1)[self._slots.to(rows.device)] = rows.flatten(0, 1)[self._sources.to(rows.device)]
        return view

    def commit(self, verdict: Verdict) -> CommitStats:
        if self._open is None:
            raise WindowError("commit without begin")
        staging, cache = self._open, self._cache
        kept = staging.check_complete(verdict)
        moved_from, moved_to = self._moves(staging, verdict, kept)
        if moved_from:
            for plane in cache.planes:
                plane.slots[:, moved_to] = plane.slots[:, moved_from]
        for row, num_kept in zip(staging.window.rows, kept, strict=True):
            cache.advance(row, num_kept)
        self._open = None
        written = staging.rows_staged + len(moved_from)
        bytes_written = written * cache.bytes_per_token + self._bytes_copied
        return CommitStats(staging.rows_staged, sum(kept), bytes_written, "moved" if moved_from else "direct")

    def abort(self) -> None:
        self._open = None

    def _moves(self, staging: Staging, verdict: Verdict, kept: list[int]) -> tuple[list[int], list[int]]:
        """Slots of kept rows that do not lie where they belong, and where they belong."""
        sources: list[int] = []
        targets: list[int] = []
        paths = verdict.path.tolist()
        for i, (row, length) in enumerate(zip(staging.window.rows, staging.window.context_lengths, strict=True)):
            slots = self._cache.slots(row, length, staging.num_nodes[i])
            for depth, node in enumerate(paths[i][: kept[i]]):
                if node != depth:
                    sources.append(slots[node])
                    targets.append(slots[depth])
        return sources, targets
