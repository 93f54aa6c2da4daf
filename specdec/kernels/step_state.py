"""The book-keeping of a step on the device: what the window looks like before it, what has changed behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

HEADER = 4
"""Columns of a record before its three `[w]` parts: kept nodes, next token, stopped, window nodes."""


@dataclass(frozen=True)
class StepBuffers:
    """Everything a step reads and writes besides pages and features, at addresses that never change."""

    tokens: Int[Tensor, "b w"]
    parents: Int[Tensor, "b w"]
    num_nodes: Int[Tensor, " b"]
    depths: Int[Tensor, "b w"]
    positions: Int[Tensor, "b w"]
    ancestor_bits: Int[Tensor, "b w"]
    lengths: Int[Tensor, " b"]
    """Committed tokens."""
    limits: Int[Tensor, " b"]
    """Tokens that the row may still emit; 0 for a row that is done."""
    counts: Int[Tensor, " b"]
    """Tokens that the row has emitted: the index of its next one."""
    roots: Int[Tensor, " b"]
    record: Int[Tensor, "b r"]
    """What the host reads of a step: header, tokens, parents, path."""

    @staticmethod
    def empty(rows: int, width: int, device: torch.device) -> StepBuffers:
        """Buffers of rows that are done; the window is a chain until someone says otherwise."""

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.long, device=device)

        chain = (torch.arange(width, device=device) - 1).clamp(min=0).repeat(rows, 1)
        return StepBuffers(
            tokens=numbers(rows, width),
            parents=chain,
            num_nodes=numbers(rows) + 1,
            depths=numbers(rows, width),
            positions=numbers(rows, width),
            ancestor_bits=numbers(rows, width),
            lengths=torch.zeros(rows, dtype=torch.int32, device=device),
            limits=numbers(rows),
            counts=numbers(rows),
            roots=numbers(rows),
            record=numbers(rows, HEADER + 3 * width),
        )


@triton.jit
def _open_window(
    tokens_ptr,
    parents_ptr,
    num_nodes_ptr,
    lengths_ptr,
    roots_ptr,
    depths_ptr,
    positions_ptr,
    bits_ptr,
    width,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Program `row`: puts the root in place and derives depths, positions and ancestors from the parents."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, WIDTH)
    there = node < width
    at = row * width + node
    parent = tl.load(parents_ptr + at, mask=there, other=0).to(tl.int32)
    bits = (tl.full([WIDTH], 1, tl.int64) << node.to(tl.int64)) | (tl.full([WIDTH], 1, tl.int64) << parent.to(tl.int64))
    above = parent
    # Pointer doubling: after i rounds a node knows its 2^i nearest ancestors.
    for _ in tl.static_range(LEVELS):
        is_above = above[:, None] == node[None, :]
        bits = bits | tl.sum(tl.where(is_above, bits[None, :], 0), 1)
        above = tl.sum(tl.where(is_above, above[None, :], 0), 1)
    ancestors = (bits[:, None] >> node[None, :].to(tl.int64)) & 1
    depth = tl.sum(ancestors, 1) - 1
    exists = node < tl.load(num_nodes_ptr + row)
    position = tl.load(lengths_ptr + row).to(tl.int64) + tl.where(exists, depth, 0)
    tl.store(depths_ptr + at, depth, mask=there)
    tl.store(positions_ptr + at, position, mask=there)
    tl.store(bits_ptr + at, bits, mask=there)
    tl.store(tokens_ptr + row * width, tl.load(roots_ptr + row))


@triton.jit
def _settle_step(
    tokens_ptr,
    parents_ptr,
    num_nodes_ptr,
    path_ptr,
    num_kept_ptr,
    next_ptr,
    stopped_ptr,
    lengths_ptr,
    limits_ptr,
    counts_ptr,
    roots_ptr,
    record_ptr,
    width,
    WIDTH: tl.constexpr,
    HEADER: tl.constexpr,
):
    """Program `row`: writes the record and moves the row on; a row that is done stays as it is."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, WIDTH)
    there = node < width
    num_kept = tl.load(num_kept_ptr + row)
    following = tl.load(next_ptr + row)
    stopped = tl.load(stopped_ptr + row).to(tl.int64)
    record = record_ptr + row * (HEADER + 3 * width)
    tl.store(record, num_kept)
    tl.store(record + 1, following)
    tl.store(record + 2, stopped)
    tl.store(record + 3, tl.load(num_nodes_ptr + row))
    parts = record + HEADER + node
    tl.store(parts, tl.load(tokens_ptr + row * width + node, mask=there, other=0), mask=there)
    tl.store(parts + width, tl.load(parents_ptr + row * width + node, mask=there, other=0), mask=there)
    tl.store(parts + 2 * width, tl.load(path_ptr + row * width + node, mask=there, other=0), mask=there)
    limit = tl.load(limits_ptr + row)
    length = tl.load(lengths_ptr + row)
    root = tl.load(roots_ptr + row)
    # A pick of -1 (NaN) is the host's to raise; as a root it would index out of the embedding.
    ended = (stopped == 1) | (following < 0)
    tl.store(limits_ptr + row, tl.where(ended, 0, limit - num_kept))
    tl.store(lengths_ptr + row, length + num_kept.to(length.dtype))
    tl.store(counts_ptr + row, tl.load(counts_ptr + row) + num_kept)
    tl.store(roots_ptr + row, tl.where((num_kept > 0) & (following >= 0), following, root))


def open_window(buffers: StepBuffers) -> None:
    """Fill in what follows from roots, drafted tokens, parents and lengths; mutates the buffers."""
    rows, width = buffers.tokens.shape
    _open_window[(rows,)](
        buffers.tokens,
        buffers.parents,
        buffers.num_nodes,
        buffers.lengths,
        buffers.roots,
        buffers.depths,
        buffers.positions,
        buffers.ancestor_bits,
        width,
        WIDTH=triton.next_power_of_2(width),
        LEVELS=(width - 1).bit_length(),
        num_warps=1 if width <= 16 else 8,
    )


def settle_step(
    buffers: StepBuffers,
    path: Int[Tensor, "b w"],
    num_kept: Int[Tensor, " b"],
    next_tokens: Int[Tensor, " b"],
    stopped: Int[Tensor, " b"],
) -> None:
    """Record the step and advance lengths, limits, counts and roots; mutates the buffers."""
    rows, width = buffers.tokens.shape
    _settle_step[(rows,)](
        buffers.tokens,
        buffers.parents,
        buffers.num_nodes,
        path,
        num_kept,
        next_tokens,
        stopped,
        buffers.lengths,
        buffers.limits,
        buffers.counts,
        buffers.roots,
        buffers.record,
        width,
        WIDTH=triton.next_power_of_2(width),
        HEADER=HEADER,
        num_warps=1,
    )


def open_window_naive(buffers: StepBuffers) -> None:
    """The twin of `open_window`."""
    buffers.tokens[:, 0] = buffers.roots
    for row, parents in enumerate(buffers.parents.tolist()):
        depths, bits = [0], [1]
        for node in range(1, len(parents)):
            depths.append(depths[parents[node]] + 1)
            bits.append(bits[parents[node]] | 1 << node)
        for node in range(len(parents)):
            exists = node < int(buffers.num_nodes[row])
            buffers.depths[row, node] = depths[node]
            buffers.positions[row, node] = int(buffers.lengths[row]) + (depths[node] if exists else 0)
            # The 64th bit is the sign.
            buffers.ancestor_bits[row, node] = bits[node] - (1 << 64 if bits[node] >> 63 else 0)


def settle_step_naive(
    buffers: StepBuffers,
    path: Int[Tensor, "b w"],
    num_kept: Int[Tensor, " b"],
    next_tokens: Int[Tensor, " b"],
    stopped: Int[Tensor, " b"],
) -> None:
    """The twin of `settle_step`."""
    header = torch.stack([num_kept, next_tokens, stopped.long(), buffers.num_nodes], dim=1)
    buffers.record.copy_(torch.cat([header, buffers.tokens, buffers.parents, path], dim=1))
    for row in range(len(num_kept)):
        kept, following = int(num_kept[row]), int(next_tokens[row])
        buffers.limits[row] = 0 if bool(stopped[row]) or following < 0 else int(buffers.limits[row]) - kept
        buffers.lengths[row] += kept
        buffers.counts[row] += kept
        if kept > 0 and following >= 0:
            buffers.roots[row] = following
