"""Matrix products of a few rows with a large weight, with what stands before and after them in a decoder layer.

A window has few rows, so a product takes as long as reading its weight; the norm before it and the rotation, gate or
residual behind it then cost nothing.  Weights are read where the model keeps them, merged ones as several pointers.
RMSNorm is a factor per row, so it is applied behind the product: `norm(x) W = ((x · g) W) / rms(x)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import ConfigError


@triton.jit
def _project_heads(
    x_ptr,
    norm_ptr,
    q_weight_ptr,
    k_weight_ptr,
    v_weight_ptr,
    q_bias_ptr,
    k_bias_ptr,
    v_bias_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    rows,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program `(part of a head, tile of rows)`: the columns `c` and `c + HALF` of a head, which the rotation mixes."""
    parts: tl.constexpr = HALF // BLOCK_N
    head = tl.program_id(0) // parts
    low = (tl.program_id(0) % parts) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < rows
    weight, bias, out, count = q_weight_ptr, q_bias_ptr, q_out_ptr, HEADS
    if head >= HEADS + KV_HEADS:
        weight, bias, out, count = v_weight_ptr, v_bias_ptr, v_out_ptr, KV_HEADS
    elif head >= HEADS:
        weight, bias, out, count = k_weight_ptr, k_bias_ptr, k_out_ptr, KV_HEADS
    own = head
    if head >= HEADS + KV_HEADS:
        own = head - HEADS - KV_HEADS
    elif head >= HEADS:
        own = head - HEADS
    column = own * 2 * HALF + low
    first = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row[:, None] * SIZE + k[None, :], mask=exists[:, None], other=0.0)
        at = column.to(tl.int64)[:, None] * SIZE + k[None, :]
        first_weight = tl.load(weight + at)
        second_weight = tl.load(weight + at + HALF * SIZE)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
        x = (x * tl.load(norm_ptr + k)[None, :]).to(first_weight.dtype)
        first = tl.dot(x, tl.trans(first_weight), first, input_precision="ieee")
        second = tl.dot(x, tl.trans(second_weight), second, input_precision="ieee")
    factor = tl.rsqrt(squares / SIZE + eps)
    first *= factor[:, None]
    second *= factor[:, None]
    if BIASED:
        first += tl.load(bias + column)[None, :].to(tl.float32)
        second += tl.load(bias + column + HALF)[None, :].to(tl.float32)
    if head < HEADS + KV_HEADS:
        position = tl.load(positions_ptr + row, mask=exists, other=0)
        at = position[:, None] * HALF + low[None, :]
        cos = tl.load(cos_ptr + at).to(tl.float32)
        sin = tl.load(sin_ptr + at).to(tl.float32)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    at = row.to(tl.int64)[:, None] * count * 2 * HALF + column[None, :]
    tl.store(out + at, first.to(out.dtype.element_ty), mask=exists[:, None])
    tl.store(out + at + HALF, second.to(out.dtype.element_ty), mask=exists[:, None])


@triton.jit
def _gate(
    x_ptr,
    norm_ptr,
    gate_ptr,
    up_ptr,
    out_ptr,
    rows,
    eps,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program `(tile of columns, tile of rows)`: `silu(norm(x) gate) · norm(x) up`."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < rows
    inside = column < OUT
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row[:, None] * SIZE + k[None, :], mask=exists[:, None], other=0.0)
        at = column.to(tl.int64)[:, None] * SIZE + k[None, :]
        gate_weight = tl.load(gate_ptr + at, mask=inside[:, None], other=0.0)
        up_weight = tl.load(up_ptr + at, mask=inside[:, None], other=0.0)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
        x = (x * tl.load(norm_ptr + k)[None, :]).to(gate_weight.dtype)
        gate = tl.dot(x, tl.trans(gate_weight), gate, input_precision="ieee")
        up = tl.dot(x, tl.trans(up_weight), up, input_precision="ieee")
    factor = tl.rsqrt(squares / SIZE + eps)
    gate *= factor[:, None]
    up *= factor[:, None]
    result = gate / (1.0 + tl.exp(-gate)) * up
    at = row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=exists[:, None] & inside[None, :])


@triton.jit
def _linear(
    x_ptr,
    norm_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    rows,
    eps,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    NORMED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program `(tile of columns, tile of rows)`: `norm(x) weight` or `residual + x weight`."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < rows
    inside = column < OUT
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row[:, None] * SIZE + k[None, :], mask=exists[:, None], other=0.0)
        at = column.to(tl.int64)[:, None] * SIZE + k[None, :]
        weight = tl.load(weight_ptr + at, mask=inside[:, None], other=0.0)
        if NORMED:
            squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
            x = (x * tl.load(norm_ptr + k)[None, :]).to(weight.dtype)
        product = tl.dot(x, tl.trans(weight), product, input_precision="ieee")
    if NORMED:
        product *= tl.rsqrt(squares / SIZE + eps)[:, None]
    at = row.to(tl.int64)[:, None] * OUT + column[None, :]
    wanted = exists[:, None] & inside[None, :]
    if RESIDUAL:
        product += tl.load(residual_ptr + at, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, product.to(out_ptr.dtype.element_ty), mask=wanted)


@dataclass(frozen=True)
class Blocks:
    """How one product is cut."""

    block_m: int
    block_n: int
    """Columns of one accumulator."""
    block_k: int
    num_warps: int
    num_stages: int

    @staticmethod
    def choose(rows: int, size: int, columns: int, accumulators: int, element_size: int) -> Blocks:
        """Enough programs to keep all multiprocessors reading, and enough bytes in flight in each.

        Raises `ConfigError` where the inner size is no multiple of 16.
        """
        block_k = next((b for b in (128, 64, 32, 16) if size % b == 0), 0)
        if not block_k:
            raise ConfigError(f"inner size {size}; accepted: multiples of 16")
        block_m = min(64, max(16, triton.next_power_of_2(rows)))
        # A program takes at least 16 columns; wide products take wider tiles, so that the rows are read less often.
        block_n = 16
        while block_n < 64 // accumulators and columns // (2 * block_n) >= 128:
            block_n *= 2
        stage = (accumulators * block_n + block_m) * block_k * element_size
        num_stages = max(2, min(size // block_k, 6, 96 * 1024 // stage))
        return Blocks(block_m, block_n, block_k, num_warps=4, num_stages=num_stages)


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of every position, one column for each pair `(c, c + d/2)` of channels."""

    cos: Float[Tensor, "positions half"]
    sin: Float[Tensor, "positions half"]


def project_heads(
    x: Float[Tensor, "n d"],
    norm: Float[Tensor, " d"],
    eps: float,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor, Tensor, Tensor] | None,
    rotation: Rotation,
    positions: Int[Tensor, " n"],
    blocks: Blocks | None = None,
) -> tuple[Float[Tensor, "n heads dh"], Float[Tensor, "n h dh"], Float[Tensor, "n h dh"]]:
    """Norm, Q, K and V projections and the rotation of Q and K in one launch."""
    rows, size = x.shape
    half = rotation.cos.shape[1]
    heads, kv_heads = (weight.shape[0] // (2 * half) for weight in weights[:2])
    q, k, v = (torch.empty(rows, h, 2 * half, dtype=x.dtype, device=x.device) for h in (heads, kv_heads, kv_heads))
    blocks = blocks or Blocks.choose(rows, size, (heads + 2 * kv_heads) * half, 2, x.element_size())
    block_n = next(b for b in (32, 16, 8, 4, 2, 1) if b <= blocks.block_n and half % b == 0)
    _project_heads[((heads + 2 * kv_heads) * (half // block_n), triton.cdiv(rows, blocks.block_m))](
        x,
        norm,
        *weights,
        *(biases or weights),
        rotation.cos,
        rotation.sin,
        positions,
        q,
        k,
        v,
        rows,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        SIZE=size,
        BIASED=biases is not None,
        BLOCK_M=blocks.block_m,
        BLOCK_N=block_n,
        BLOCK_K=blocks.block_k,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    return q, k, v


def gate(
    x: Float[Tensor, "n d"],
    norm: Float[Tensor, " d"],
    eps: float,
    gate_weight: Float[Tensor, "i d"],
    up_weight: Float[Tensor, "i d"],
    blocks: Blocks | None = None,
) -> Float[Tensor, "n i"]:
    """Norm, gate and up projections and SiLU in one launch."""
    rows, size = x.shape
    columns = gate_weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    blocks = blocks or Blocks.choose(rows, size, columns, 2, x.element_size())
    _gate[(triton.cdiv(columns, blocks.block_n), triton.cdiv(rows, blocks.block_m))](
        x,
        norm,
        gate_weight,
        up_weight,
        out,
        rows,
        eps,
        SIZE=size,
        OUT=columns,
        BLOCK_M=blocks.block_m,
        BLOCK_N=blocks.block_n,
        BLOCK_K=blocks.block_k,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    return out


def linear(
    x: Float[Tensor, "n d"],
    weight: Float[Tensor, "o d"],
    *,
    norm: Float[Tensor, " d"] | None = None,
    eps: float = 0.0,
    residual: Float[Tensor, "n o"] | None = None,
    blocks: Blocks | None = None,
) -> Float[Tensor, "n o"]:
    """`residual + norm(x) weight`, norm and residual where given, in one launch."""
    rows, size = x.shape
    columns = weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    blocks = blocks or Blocks.choose(rows, size, columns, 1, x.element_size())
    _linear[(triton.cdiv(columns, blocks.block_n), triton.cdiv(rows, blocks.block_m))](
        x,
        x if norm is None else norm,
        weight,
        x if residual is None else residual,
        out,
        rows,
        eps,
        SIZE=size,
        OUT=columns,
        NORMED=norm is not None,
        RESIDUAL=residual is not None,
        BLOCK_M=blocks.block_m,
        BLOCK_N=blocks.block_n,
        BLOCK_K=blocks.block_k,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    return out


def project_heads_naive(
    x: Float[Tensor, "n d"],
    norm: Float[Tensor, " d"],
    eps: float,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor, Tensor, Tensor] | None,
    rotation: Rotation,
    positions: Int[Tensor, " n"],
) -> tuple[Float[Tensor, "n heads dh"], Float[Tensor, "n h dh"], Float[Tensor, "n h dh"]]:
    """The twin of `project_heads`."""
    half = rotation.cos.shape[1]
    normed = F.rms_norm(x, norm.shape, norm, eps)
    q, k, v = (
        F.linear(normed, weight, bias).unflatten(-1, (-1, 2 * half))
        for weight, bias in zip(weights, biases or (None, None, None), strict=True)
    )
    return rotate_naive(q, rotation, positions), rotate_naive(k, rotation, positions), v


def rotate_naive(
    x: Float[Tensor, "n h dh"], rotation: Rotation, positions: Int[Tensor, " n"]
) -> Float[Tensor, "n h dh"]:
    """Turn each pair `(c, c + d/2)` of channels by its position's angle."""
    cos, sin = (table[positions][:, None].to(x.dtype) for table in (rotation.cos, rotation.sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def gate_naive(
    x: Float[Tensor, "n d"],
    norm: Float[Tensor, " d"],
    eps: float,
    gate_weight: Float[Tensor, "i d"],
    up_weight: Float[Tensor, "i d"],
) -> Float[Tensor, "n i"]:
    """The twin of `gate`."""
    normed = F.rms_norm(x, norm.shape, norm, eps)
    return F.silu(F.linear(normed, gate_weight)) * F.linear(normed, up_weight)


def linear_naive(
    x: Float[Tensor, "n d"],
    weight: Float[Tensor, "o d"],
    *,
    norm: Float[Tensor, " d"] | None = None,
    eps: float = 0.0,
    residual: Float[Tensor, "n o"] | None = None,
) -> Float[Tensor, "n o"]:
    """The twin of `linear`."""
    out = F.linear(x if norm is None else F.rms_norm(x, norm.shape, norm, eps), weight)
    return out if residual is None else residual + out
