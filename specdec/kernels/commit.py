"""The kept rows of a window, all layers, from where they were staged into their pages: one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from specdec.errors import ConfigError

FIELDS = 5
"""Numbers that describe one plane: source address, its row stride, its node stride, page address, elements of a row."""

BLOCK_TOKENS = 8
BLOCK_ELEMENTS = 512


@triton.jit
def _commit_rows(
    planes_ptr,
    table_ptr,
    starts_ptr,
    path_ptr,
    num_kept_ptr,
    table_stride,
    path_stride,
    PAGE_SIZE: tl.constexpr,
    ELEMENT: tl.constexpr,
    FIELDS: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Program `(plane, row)` copies the row's kept nodes, `TOKENS` at a time; nothing else is written."""
    plane = tl.program_id(0) * FIELDS
    row = tl.program_id(1).to(tl.int64)
    source = tl.load(planes_ptr + plane).to(tl.pointer_type(ELEMENT))
    row_stride = tl.load(planes_ptr + plane + 1)
    node_stride = tl.load(planes_ptr + plane + 2)
    pages = tl.load(planes_ptr + plane + 3).to(tl.pointer_type(ELEMENT))
    row_elements = tl.load(planes_ptr + plane + 4)
    num_kept = tl.load(num_kept_ptr + row).to(tl.int32)
    start = tl.load(starts_ptr + row).to(tl.int32)
    for begin in range(0, num_kept, TOKENS):
        depth = begin + tl.arange(0, TOKENS)
        kept = depth < num_kept
        node = tl.load(path_ptr + row * path_stride + depth, mask=kept, other=0).to(tl.int64)
        at = start + depth
        page = tl.load(table_ptr + row * table_stride + at // PAGE_SIZE, mask=kept, other=0).to(tl.int64)
        slot = page * PAGE_SIZE + at % PAGE_SIZE
        for first in range(0, row_elements, ELEMENTS):
            element = first + tl.arange(0, ELEMENTS)
            wanted = kept[:, None] & (element < row_elements)[None, :]
            read_at = row * row_stride + node[:, None] * node_stride + element[None, :]
            values = tl.load(source + read_at, mask=wanted)
            tl.store(pages + slot[:, None] * row_elements + element[None, :], values, mask=wanted)


@final
class CommitTable:
    """Where the staged rows of each plane (one layer's K or V) lie and where their pages are.

    The table may be filled after a CUDA graph captured `commit_rows` with it: the graph holds its address only.
    """

    def __init__(self, num_planes: int, element_size: int, page_size: int, device: torch.device) -> None:
        if element_size not in _ELEMENTS:
            raise ConfigError(f"element_size={element_size}; accepted: {', '.join(map(str, _ELEMENTS))} bytes")
        self.element_size = element_size
        self.page_size = page_size
        self.fields: Int[Tensor, "planes fields"] = torch.zeros(num_planes, FIELDS, dtype=torch.long, device=device)

    def fill(self, staged: Sequence[Tensor], pages: Sequence[Tensor]) -> None:
        """Point the table at staged rows `[b w *row]` and pages `[num_pages page_size *row]`, which must outlive it.

        Raises `ConfigError` where a row is not one run of elements.
        """
        fields = []
        for plane, (rows, target) in enumerate(zip(staged, pages, strict=True)):
            elements = target[0, 0].numel()
            if rows.element_size() != self.element_size or target.dtype != rows.dtype:
                raise ConfigError(
                    f"plane {plane}: {rows.dtype} into {target.dtype}; accepted: {self.element_size} bytes each"
                )
            if not rows[0, 0].is_contiguous() or rows[0, 0].numel() != elements or not target.is_contiguous():
                raise ConfigError(
                    f"plane {plane}: rows of {tuple(rows.shape[2:])} do not lie as those of {tuple(target.shape)}"
                )
            if target.shape[1] != self.page_size:
                raise ConfigError(f"plane {plane}: pages of {target.shape[1]} tokens; accepted: {self.page_size}")
            fields.append([rows.data_ptr(), rows.stride(0), rows.stride(1), target.data_ptr(), elements])
        self.fields.copy_(torch.tensor(fields, dtype=torch.long))


_ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def commit_rows(
    planes: CommitTable,
    page_table: Int[Tensor, "b max_pages"],
    starts: Int[Tensor, " b"],
    path: Int[Tensor, "b k"],
    num_kept: Int[Tensor, " b"],
) -> None:
    """Write node `path[row, i]` of every plane to token `starts[row] + i` of its row, for `i < num_kept[row]`.

    Rows that are not kept touch no page.  Reads nothing on the host; mutates the pages.
    """
    _commit_rows[(len(planes.fields), len(path))](
        planes.fields,
        page_table,
        starts,
        path,
        num_kept,
        page_table.stride(0),
        path.stride(0),
        PAGE_SIZE=planes.page_size,
        ELEMENT=_ELEMENTS[planes.element_size],
        FIELDS=FIELDS,
        TOKENS=BLOCK_TOKENS,
        ELEMENTS=BLOCK_ELEMENTS,
        num_warps=4,
    )


def commit_rows_naive(
    staged: Sequence[Tensor],
    pages: Sequence[Tensor],
    page_table: Int[Tensor, "b max_pages"],
    starts: Int[Tensor, " b"],
    path: Int[Tensor, "b k"],
    num_kept: Int[Tensor, " b"],
) -> None:
    """The twin of `commit_rows`: one token after the other."""
    for rows, target in zip(staged, pages, strict=True):
        for row, count in enumerate(num_kept.tolist()):
            for depth in range(count):
                page, offset = divmod(int(starts[row]) + depth, target.shape[1])
                target[int(page_table[row, page]), offset] = rows[row, int(path[row, depth])]
