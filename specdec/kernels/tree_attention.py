"""Attention of a window's nodes over committed pages and staged rows, split over programs and merged by log-sum-exp.

Split-KV decoding after Dao et al. 2023 ("Flash-Decoding"); the tree mask (Miao et al. 2023, arXiv:2305.09781, section
4.2) is one 64-bit integer per node.  Lengths are read on the device, so that one CUDA graph serves every context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from specdec.kernels.launch import launch_options, let_next_start, wait_for_inputs
from specdec.kernels.tiling import Tiling, programs_wanted


@triton.jit
def _absorb(q, k, v, k_scale, v_scale, seen, top, total, mixed, scale, softcap, CAPPED: tl.constexpr):
    """One block of keys enters the running softmax (base 2, fp32); rows that saw nothing yet keep `top = -inf`."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * k_scale[None, :] * scale
    if CAPPED:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap))))
    scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row without any visible key has new_top = -inf, and -inf - -inf is NaN: such rows are measured from 0 instead.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(top - base)
    total = total * kept + tl.sum(weights, 1)
    weights = weights * v_scale[None, :]
    mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_top, total, mixed


@triton.jit
def _attend_split(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    bits_ptr,
    positions_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    softcap,
    width,
    table_stride,
    q_row,
    q_head,
    q_node,
    k_row,
    k_node,
    k_head,
    v_row,
    v_node,
    v_head,
    SPLITS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLIDING: tl.constexpr,
    CAPPED: tl.constexpr,
    QUANTISED: tl.constexpr,
    CHAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program `(tile, row · KV_HEADS + kv_head, split)`; the last split is the window, the others share the prefix."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    tile = tl.program_id(0)
    row = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    # The query heads that share a KV head are further rows of the tile: node · GROUP + member.
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    exists = packed < width * GROUP
    dk = tl.arange(0, DK_PADDED)
    dv = tl.arange(0, DV_PADDED)
    step = tl.arange(0, BLOCK_N)
    q_at = row * q_row + head[:, None] * q_head + node[:, None] * q_node + dk[None, :]
    q = tl.load(q_ptr + q_at, mask=exists[:, None] & (dk < DK)[None, :], other=0.0)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    position = tl.zeros([BLOCK_M], tl.int32)
    if SLIDING > 0:
        position = tl.load(positions_ptr + row * width + node, mask=exists, other=0).to(tl.int32)
    ones = tl.full([BLOCK_N], 1.0, tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, DV_PADDED], tl.float32)
    if split < SPLITS:
        first = 0
        if SLIDING > 0:
            first = tl.maximum(length - SLIDING + 1, 0)
        share = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK_N) * BLOCK_N
        start = first + split * share
        stop = tl.minimum(start + share, length)
        for begin in range(start, stop, BLOCK_N):
            key = begin + step
            committed = key < stop
            page = tl.load(table_ptr + row * table_stride + key // PAGE_SIZE, mask=committed, other=0).to(tl.int64)
            slot = (page * PAGE_SIZE + key % PAGE_SIZE) * KV_HEADS + kv_head
            k = tl.load(
                k_pages_ptr + slot[:, None] * DK + dk[None, :], mask=committed[:, None] & (dk < DK)[None, :], other=0.0
            )
            v = tl.load(
                v_pages_ptr + slot[:, None] * DV + dv[None, :], mask=committed[:, None] & (dv < DV)[None, :], other=0.0
            )
            k_scale, v_scale = ones, ones
            if QUANTISED:
                k_scale = tl.load(k_scales_ptr + slot, mask=committed, other=0.0).to(tl.float32)
                v_scale = tl.load(v_scales_ptr + slot, mask=committed, other=0.0).to(tl.float32)
            seen = committed[None, :] & exists[:, None]
            if SLIDING > 0:
                seen = seen & (position[:, None] - key[None, :] < SLIDING)
            top, total, mixed = _absorb(
                q, k.to(q.dtype), v.to(q.dtype), k_scale, v_scale, seen, top, total, mixed, scale, softcap, CAPPED
            )
    else:
        bits = tl.zeros([BLOCK_M], tl.int64)
        stop = width
        if CHAIN:
            stop = tl.minimum(width, (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
        else:
            bits = tl.load(bits_ptr + row * width + node, mask=exists, other=0)
        # A tree is one block, which needs no pipeline (and its buffers would cost shared memory).
        for begin in tl.range(0, stop, BLOCK_N, num_stages=2 if CHAIN else 1):
            key = begin + step
            staged = key < width
            k = tl.load(
                k_ptr + row * k_row + key[:, None] * k_node + kv_head * k_head + dk[None, :],
                mask=staged[:, None] & (dk < DK)[None, :],
                other=0.0,
            )
            v = tl.load(
                v_ptr + row * v_row + key[:, None] * v_node + kv_head * v_head + dv[None, :],
                mask=staged[:, None] & (dv < DV)[None, :],
                other=0.0,
            )
            seen = staged[None, :] & exists[:, None]
            if CHAIN:
                seen = seen & (key[None, :] <= node[:, None])
            else:
                seen = seen & (((bits[:, None] >> key[None, :].to(tl.int64)) & 1) == 1)
            if SLIDING > 0:
                at = tl.load(positions_ptr + row * width + key, mask=staged, other=0).to(tl.int32)
                seen = seen & (position[:, None] - at[None, :] < SLIDING)
            top, total, mixed = _absorb(q, k, v, ones, ones, seen, top, total, mixed, scale, softcap, CAPPED)
    nothing = total == 0.0
    out_at = ((row * KV_HEADS * GROUP + head) * width + node) * (SPLITS + 1) + split
    lse = tl.where(nothing, float("-inf"), top + tl.log2(tl.where(nothing, 1.0, total)))
    tl.store(lse_ptr + out_at, lse, mask=exists)
    mixed = mixed / tl.where(nothing, 1.0, total)[:, None]
    # What an empty split would store is never read.
    wanted = (exists & (total > 0.0))[:, None] & (dv < DV)[None, :]
    tl.store(partial_ptr + out_at[:, None] * DV + dv[None, :], mixed, mask=wanted)


@triton.jit
def _merge_splits(
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    out_ptr,
    width,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program `(row · HEADS + head) · width + node` adds up its splits; a sink is one more summand without a value."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    program = tl.program_id(0).to(tl.int64)
    node = program % width
    head = (program // width) % HEADS
    row = program // width // HEADS
    part = tl.arange(0, PARTS)
    dv = tl.arange(0, DV_PADDED)
    lse = tl.load(lse_ptr + program * PARTS + part)
    top = tl.max(lse, 0)
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    share = tl.exp2(lse - top)
    total = tl.sum(share, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    at = (program * PARTS + part[:, None]) * DV + dv[None, :]
    partial = tl.load(partial_ptr + at, mask=(share > 0.0)[:, None] & (dv < DV)[None, :], other=0.0)
    mixed = tl.sum(partial * share[:, None], 0) / total
    out_at = ((row * width + node) * HEADS + head) * DV + dv
    tl.store(out_ptr + out_at, mixed.to(out_ptr.dtype.element_ty), mask=dv < DV)


def tree_attention(
    query: Float[Tensor, "b heads w dk"],
    k_pages: Float[Tensor, "pages size h dk"],
    v_pages: Float[Tensor, "pages size h dv"],
    k: Float[Tensor, "b w h dk"],
    v: Float[Tensor, "b w h dv"],
    page_table: Int[Tensor, "b max_pages"],
    lengths: Int[Tensor, " b"],
    positions: Int[Tensor, "b w"],
    ancestor_bits: Int[Tensor, "b w"] | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    k_scales: Float[Tensor, "pages size h"] | None = None,
    v_scales: Float[Tensor, "pages size h"] | None = None,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Float[Tensor, "b w heads dv"]:
    """Softmax attention of each node over the committed prefix and its ancestors; never reads an uncommitted slot.

    `ancestor_bits` None means chains, of any width; trees have at most 64 nodes.  Nothing is read on the host.
    With `pdl` both kernels start while the one in front of them ends.
    """
    rows, heads, width, size_k = query.shape
    kv_heads, size_v = k_pages.shape[2], v_pages.shape[3]
    group = heads // kv_heads
    query, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, k, v))
    if tiling is None:
        small = max(size_k, size_v) > 128 or query.element_size() > 2
        tiling = Tiling.choose(rows * kv_heads, group * width, small, programs_wanted(query.device))
    parts = tiling.splits + 1
    partial = torch.empty(rows * heads * width * parts, size_v, dtype=torch.float32, device=query.device)
    lse = torch.empty(rows * heads * width * parts, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, width, heads, size_v, dtype=query.dtype, device=query.device)
    padded_v = max(16, triton.next_power_of_2(size_v))
    grid = (triton.cdiv(group * width, tiling.block_m), rows * kv_heads, parts)
    _attend_split[grid](
        query,
        k_pages,
        v_pages,
        lse if k_scales is None else k_scales,
        lse if v_scales is None else v_scales,
        k,
        v,
        page_table,
        lengths,
        positions if ancestor_bits is None else ancestor_bits,
        positions,
        partial,
        lse,
        scaling,
        softcap or 1.0,
        width,
        page_table.stride(0),
        query.stride(0),
        query.stride(1),
        query.stride(2),
        *k.stride()[:3],
        *v.stride()[:3],
        SPLITS=tiling.splits,
        KV_HEADS=kv_heads,
        GROUP=group,
        DK=size_k,
        DV=size_v,
        DK_PADDED=max(16, triton.next_power_of_2(size_k)),
        DV_PADDED=padded_v,
        PAGE_SIZE=k_pages.shape[1],
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        SLIDING=sliding_window or 0,
        CAPPED=softcap is not None,
        QUANTISED=k_scales is not None,
        CHAIN=ancestor_bits is None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **launch_options(pdl),
    )
    _merge_splits[(rows * heads * width,)](
        partial,
        lse,
        lse if sinks is None else sinks,
        out,
        width,
        HEADS=heads,
        DV=size_v,
        DV_PADDED=padded_v,
        PARTS=parts,
        SINKS=sinks is not None,
        num_warps=1 if parts * padded_v <= 1024 else 4,
        **launch_options(pdl),
    )
    return out


def tree_attention_naive(
    query: Float[Tensor, "b heads w dk"],
    k_pages: Float[Tensor, "pages size h dk"],
    v_pages: Float[Tensor, "pages size h dv"],
    k: Float[Tensor, "b w h dk"],
    v: Float[Tensor, "b w h dv"],
    page_table: Int[Tensor, "b max_pages"],
    lengths: Int[Tensor, " b"],
    positions: Int[Tensor, "b w"],
    ancestor_bits: Int[Tensor, "b w"] | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    k_scales: Float[Tensor, "pages size h"] | None = None,
    v_scales: Float[Tensor, "pages size h"] | None = None,
) -> Float[Tensor, "b w heads dv"]:
    """The twin of `tree_attention`: one row, one head, one node after the other, in float64."""
    (rows, heads, width, _), (_, page_size, kv_heads, _) = query.shape, k_pages.shape
    out = torch.zeros(rows, width, heads, v.shape[3], dtype=torch.float64, device=query.device)
    for row in range(rows):
        length = int(lengths[row])
        slots = [int(page_table[row, t // page_size]) * page_size + t % page_size for t in range(length)]
        for head in range(heads):
            kv = head // (heads // kv_heads)
            key, value = (pages.flatten(0, 1)[slots, kv].double() for pages in (k_pages, v_pages))
            if k_scales is not None and v_scales is not None:
                key = key * k_scales.flatten(0, 1)[slots, kv, None].double()
                value = value * v_scales.flatten(0, 1)[slots, kv, None].double()
            key, value = torch.cat([key, k[row, :, kv].double()]), torch.cat([value, v[row, :, kv].double()])
            where = list(range(length)) + positions[row].tolist()
            for node in range(width):
                ancestors = (2 << node) - 1 if ancestor_bits is None else int(ancestor_bits[row, node])
                near = [sliding_window is None or int(positions[row, node]) - at < sliding_window for at in where]
                seen = [near[j] and (j < length or ancestors >> (j - length) & 1 == 1) for j in range(len(where))]
                scores = key[seen] @ query[row, head, node].double() * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                out[row, node, head] = scores.softmax(0)[: sum(seen)] @ value[seen]
    return out
