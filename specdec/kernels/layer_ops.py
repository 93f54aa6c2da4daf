"""What stands between the matrix products of a decoder layer when those go to the vendor's library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from specdec.kernels.skinny_linear import Rotation, rotate_naive


@triton.jit
def _add_norm(
    x_ptr, y_ptr, norm_ptr, sum_ptr, out_ptr, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, ADDED: tl.constexpr
):
    """Program `row`: `x + y` (or `x` alone), and its RMSNorm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    at = row * SIZE + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if ADDED:
        x = (x.to(tl.float32) + tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + at, x, mask=inside)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + at, (normed.to(x.dtype) * norm).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    q_row,
    k_row,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Program `(row, head)`: one head of Q or K, turned by its position's angle."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, PADDED)
    inside = column < HALF
    position = tl.load(positions_ptr + row)
    cos = tl.load(cos_ptr + position * HALF + column, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * HALF + column, mask=inside, other=0.0).to(tl.float32)
    source, target = q_ptr + row * q_row + head * 2 * HALF, q_out_ptr + (row * HEADS + head) * 2 * HALF
    if head >= HEADS:
        own = head - HEADS
        source, target = k_ptr + row * k_row + own * 2 * HALF, k_out_ptr + (row * KV_HEADS + own) * 2 * HALF
    first = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + column + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + column, (first * cos - second * sin).to(q_out_ptr.dtype.element_ty), mask=inside)
    tl.store(target + column + HALF, (second * cos + first * sin).to(q_out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_ptr, up_ptr, out_ptr, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program `(row, block)`: `silu(gate) · up`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + column, result.to(out_ptr.dtype.element_ty), mask=inside)


def add_norm(
    x: Float[Tensor, "n d"], y: Float[Tensor, "n d"] | None, norm: Float[Tensor, " d"], eps: float
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """`x + y` (`x` where `y` is None) and its RMSNorm."""
    rows, size = x.shape
    total = x if y is None else torch.empty_like(x)
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        x,
        x if y is None else y,
        norm,
        total,
        out,
        eps,
        SIZE=size,
        PADDED=padded,
        ADDED=y is not None,
        num_warps=min(16, max(1, padded // 512)),
    )
    return total, out


def rotate_heads(
    q: Float[Tensor, "n q"], k: Float[Tensor, "n k"], rotation: Rotation, positions: Int[Tensor, " n"]
) -> tuple[Float[Tensor, "n heads dh"], Float[Tensor, "n h dh"]]:
    """Q and K turned by their positions' angles; rows may lie inside wider ones, as a merged projection leaves them."""
    half = rotation.cos.shape[1]
    rows, heads, kv_heads = len(q), q.shape[1] // (2 * half), k.shape[1] // (2 * half)
    q_out, k_out = (torch.empty(rows, h, 2 * half, dtype=q.dtype, device=q.device) for h in (heads, kv_heads))
    _rotate[(rows, heads + kv_heads)](
        q,
        k,
        rotation.cos,
        rotation.sin,
        positions,
        q_out,
        k_out,
        q.stride(0),
        k.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        PADDED=triton.next_power_of_2(half),
        num_warps=1,
    )
    return q_out, k_out


def silu_mul(gate: Float[Tensor, "n i"], up: Float[Tensor, "n i"]) -> Float[Tensor, "n i"]:
    """`silu(gate) · up`; the rows may lie inside wider ones."""
    rows, size = gate.shape
    out = torch.empty(rows, size, dtype=gate.dtype, device=gate.device)
    block = min(2048, triton.next_power_of_2(size))
    grid = (rows, triton.cdiv(size, block))
    _silu_mul[grid](gate, up, out, gate.stride(0), up.stride(0), SIZE=size, BLOCK=block, num_warps=4)
    return out


def add_norm_naive(
    x: Float[Tensor, "n d"], y: Float[Tensor, "n d"] | None, norm: Float[Tensor, " d"], eps: float
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """The twin of `add_norm`."""
    total = x if y is None else x + y
    return total, F.rms_norm(total, norm.shape, norm, eps)


def rotate_heads_naive(
    q: Float[Tensor, "n q"], k: Float[Tensor, "n k"], rotation: Rotation, positions: Int[Tensor, " n"]
) -> tuple[Float[Tensor, "n heads dh"], Float[Tensor, "n h dh"]]:
    """The twin of `rotate_heads`."""
    size = 2 * rotation.cos.shape[1]
    heads, kv_heads = q.unflatten(1, (-1, size)), k.unflatten(1, (-1, size))
    return rotate_naive(heads, rotation, positions), rotate_naive(kv_heads, rotation, positions)


def silu_mul_naive(gate: Float[Tensor, "n i"], up: Float[Tensor, "n i"]) -> Float[Tensor, "n i"]:
    """The twin of `silu_mul`."""
    return F.silu(gate) * up
