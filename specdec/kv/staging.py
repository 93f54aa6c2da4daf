"""An open window: the K/V rows staged so far, and the checks that every writer shares."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import WindowError
from specdec.kv.pages import PagedKVCache
from specdec.types import KVView, Verdict, Window


class Staging:
    """Rows of one window, held by reference: nothing is copied until a commit."""

    def __init__(self, cache: PagedKVCache, window: Window) -> None:
        self.window = window
        self.cache = cache
        self.num_nodes: list[int] = window.num_nodes.tolist()
        self._rows: list[list[Tensor | None]] = [[None] * len(plane.layers) for plane in cache.planes]
        self._prefix = cache.layout(window.rows, window.tokens.device)
        for row, length in zip(window.rows, window.context_lengths, strict=True):
            if cache.length(row) != length:
                raise WindowError(
                    f"window row {row}: context length {length}; the cache holds {cache.length(row)} tokens"
                )

    @property
    def rows_staged(self) -> int:
        """Nodes of the window, padding not counted (tokens)."""
        return sum(self.num_nodes)

    def put(self, layer: int, k: Float[Tensor, "b w h dk"], v: Float[Tensor, "b w h dv"]) -> KVView:
        """Take the rows of one layer; returns what attention reads."""
        if not 0 <= layer < len(self.cache.layers):
            raise WindowError(f"stage of layer {layer}; accepted: 0 to {len(self.cache.layers) - 1}")
        shape = self.cache.layers[layer]
        size = self.window.tokens.shape
        for name, rows, width in (("k", k, shape.k_size), ("v", v, shape.v_size)):
            if rows.shape != (*size, shape.num_kv_heads, width) or rows.dtype != shape.dtype:
                found, expected = tuple(rows.shape), (*size, shape.num_kv_heads, width)
                raise WindowError(
                    f"stage of layer {layer}: {name} is {found} {rows.dtype}; expected {expected} {shape.dtype}"
                )
        places = self.cache.places(layer)
        if any(self._rows[plane][index] is not None for plane, index in places):
            raise WindowError(f"layer {layer} is staged twice in one window")
        encoded_k, encoded_v = self.cache.encode(layer, k, v)
        for (plane, index), part in zip(places, (*encoded_k.parts, *encoded_v.parts), strict=True):
            self._rows[plane][index] = part
        k_pages, v_pages = self.cache.layer_pages(layer)
        k_scales, v_scales = self.cache.layer_scales(layer)
        return KVView(k_pages, v_pages, encoded_k.rows, encoded_v.rows, self._prefix, k_scales, v_scales)

    def staged(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """`(pages, staged rows [b w *row])` of each part of a layer."""
        parts = []
        for plane, index in self.cache.places(layer):
            rows = self._rows[plane][index]
            if rows is not None:
                parts.append((self.cache.planes[plane].pages[index], rows))
        return parts

    def stacked(self, plane: int) -> Tensor:
        """All layers of a plane as one tensor `[layers b·w *row]`."""
        return torch.stack([rows for rows in self._rows[plane] if rows is not None]).flatten(1, 2)

    def check_complete(self, verdict: Verdict) -> list[int]:
        """Raise `WindowError` unless every layer is staged and the verdict fits; returns `num_kept` on the host."""
        for plane, rows in zip(self.cache.planes, self._rows, strict=True):
            for layer, staged in zip(plane.layers, rows, strict=True):
                if staged is None:
                    raise WindowError(f"commit without the rows of layer {layer}")
        kept: list[int] = verdict.num_kept.tolist()
        if len(kept) != len(self.num_nodes):
            raise WindowError(f"verdict of {len(kept)} rows on a window of {len(self.num_nodes)}")
        for row, (count, nodes, path) in enumerate(zip(kept, self.num_nodes, verdict.path.tolist(), strict=True)):
            if not 1 <= count <= min(nodes, len(path)):
                raise WindowError(f"verdict row {row} keeps {count} of {nodes} nodes with a path of {len(path)}")
            if path[0] != 0 or any(not 0 <= node < nodes for node in path[:count]):
                raise WindowError(
                    f"verdict row {row}: path {path[:count]} leaves the window of {nodes} nodes or its root"
                )
        return kept

    def source_rows(self, verdict: Verdict, kept: list[int]) -> Int[Tensor, " rows"]:
        """Row numbers (window row · w + node) of the kept nodes, row after row."""
        width = self.window.width
        paths = verdict.path.tolist()
        flat = [i * width + node for i, count in enumerate(kept) for node in paths[i][:count]]
        return torch.tensor(flat, dtype=torch.long)

    def destination_slots(self, counts: list[int]) -> Int[Tensor, " rows"]:
        """Slots of the `counts[i]` tokens behind each row's end, row after row."""
        rows = zip(self.window.rows, self.window.context_lengths, counts, strict=True)
        flat = [slot for row, length, count in rows for slot in self.cache.slots(row, length, count)]
        return torch.tensor(flat, dtype=torch.long)
