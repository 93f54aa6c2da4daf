"""Where a captured forward puts its K/V: nowhere new.  The rows stay where the model computed them, and the commit
kernel is told their addresses."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.errors import WindowError
from specdec.kernels.acceptance import Walk
from specdec.kernels.commit import CommitTable, commit_rows
from specdec.kernels.step_state import StepBuffers
from specdec.kv.pages import PagedKVCache
from specdec.kv.writer import KVStage
from specdec.types import KVView, PrefixLayout


@final
class DeviceStage(KVStage):
    """NWOR on the device: rows are staged by reference, and one launch commits the kept ones of all layers.

    A recorded forward computes its rows at the same addresses in every replay, so a table of addresses, filled once
    after the recording, serves all of them.
    """

    def __init__(self, cache: PagedKVCache, buffers: StepBuffers, page_table: Tensor) -> None:
        self._cache = cache
        self._lengths = buffers.lengths
        self._page_table = page_table
        # Host lengths are unknown here: a captured step must not depend on them.
        self._layout = PrefixLayout(page_table, buffers.lengths, (), None)
        self._staged: dict[tuple[int, int], Tensor] = {}
        # Layers may store different types: one table, and one launch, for each.
        self._groups: dict[torch.dtype, list[tuple[int, int]]] = {}
        for layer in range(len(cache.layers)):
            for place in cache.places(layer):
                self._groups.setdefault(cache.planes[place[0]].pages.dtype, []).append(place)
        # What is recorded needs tables of its own: the same step may also run unrecorded.
        self._tables = {recorded: self._make_tables() for recorded in (False, True)}

    def stage(self, layer: int, k: Float[Tensor, "b w h dk"], v: Float[Tensor, "b w h dv"]) -> KVView:
        for place, rows in zip(self._cache.places(layer), (k, v), strict=True):
            self._staged[place] = rows if rows[0, 0].is_contiguous() else rows.contiguous()
        k_pages, v_pages = self._cache.layer_pages(layer)
        return KVView(k_pages, v_pages, k, v, self._layout)

    def commit(self, walk: Walk) -> None:
        """Write the kept rows of all layers behind the committed ones; lengths are left to `settle_step`.

        Raises `WindowError` where a layer was not staged.
        """
        missing = [place for places in self._groups.values() for place in places if place not in self._staged]
        if missing:
            raise WindowError(f"commit without the rows of planes {missing}")
        recording = is_recording(self._lengths.device)
        if not recording:
            self._point(self._tables[False])
        for table in self._tables[recording].values():
            commit_rows(table, self._page_table, self._lengths, walk.path, walk.num_kept)
        if not recording:
            self._staged.clear()

    def finish_recording(self) -> None:
        """Tell the recorded commit where the recorded forward leaves its rows; once, behind the recording.

        What was run instead of recorded has left nothing staged, and told its commit itself.
        """
        if self._staged:
            self._point(self._tables[True])
            self._staged.clear()

    def _make_tables(self) -> dict[torch.dtype, CommitTable]:
        cache, device = self._cache, self._lengths.device
        return {
            dtype: CommitTable(len(places), dtype.itemsize, cache.page_size, device)
            for dtype, places in self._groups.items()
        }

    def _point(self, tables: dict[torch.dtype, CommitTable]) -> None:
        for dtype, places in self._groups.items():
            pages = [self._cache.planes[plane].pages[index] for plane, index in places]
            tables[dtype].fill([self._staged[place] for place in places], pages)


def is_recording(device: torch.device) -> bool:
    """Whether work on the current stream is being recorded rather than run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
