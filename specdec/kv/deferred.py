"""NWOR: no write on reject.  Drafted K/V stay staged until the verdict; only kept rows reach the pages."""

from __future__ import annotations

from typing import final

from jaxtyping import Float
from torch import Tensor

from specdec.errors import WindowError
from specdec.kv.pages import PagedKVCache
from specdec.kv.staging import Staging
from specdec.kv.writer import KVWriter
from specdec.types import CommitStats, KVView, Verdict, Window


@final
class DeferredWriter(KVWriter):
    """Holds a window's rows until `commit`, then writes exactly the kept ones, all layers of a plane in one call.

    A rejected row never touches a page, a shared page is never written, and aborting costs nothing.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._open: Staging | None = None
        self._bytes_copied = 0

    def begin(self, window: Window) -> None:
        if self._open is not None:
            raise WindowError("begin while a window is open; commit or abort it first")
        self._bytes_copied = self._cache.reserve(window.rows, [depth + 1 for depth in window.deepest])
        self._open = Staging(self._cache, window)

    def stage(self, layer: int, k: Float[Tensor, "b w h dk"], v: Float[Tensor, "b w h dv"]) -> KVView:
        if self._open is None:
            raise WindowError("stage without begin")
        return self._open.put(layer, k, v)

    def commit(self, verdict: Verdict) -> CommitStats:
        if self._open is None:
            raise WindowError("commit without begin")
        staging, cache = self._open, self._cache
        kept = staging.check_complete(verdict)
        slots = staging.destination_slots(kept)
        # A chain kept from one row is the front of its staged rows, and fresh rows lie contiguously: both become
        # slices.
        count, first = len(slots), int(slots[0])
        is_slice = staging.window.is_chain and len(kept) == 1 and bool((slots.diff() == 1).all())
        sources = None if is_slice else staging.source_rows(verdict, kept)
        for i, plane in enumerate(cache.planes):
            rows = staging.stacked(i)
            if sources is None:
                plane.slots[:, first : first + count] = rows[:, :count]
            else:
                plane.slots[:, slots.to(rows.device)] = rows[:, sources.to(rows.device)]
        for row, num_kept in zip(staging.window.rows, kept, strict=True):
            cache.advance(row, num_kept)
        self._open = None
        bytes_written = count * cache.bytes_per_token + self._bytes_copied
        return CommitStats(staging.rows_staged, count, bytes_written, "prefix" if is_slice else "gather")

    def abort(self) -> None:
        self._open = None
