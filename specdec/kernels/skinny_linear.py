"""Matrix products of a few rows with a large weight, with what stands before and after them in a decoder layer.

A window has few rows, so a product takes as long as reading its weight; the norm before it and the rotation, gate or
residual behind it then cost nothing.  Weights are read where the model keeps them, merged ones as several pointers.

RMSNorm is split: its weight `g` belongs to columns, so whoever makes the stream `x` also stores `x · g`; its factor
`1 / rms(x)` belongs to rows, so whoever multiplies applies it behind the product: `norm(x) W = ((x · g) W) / rms(x)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from jaxtyping import Float, Int
from torch import Tensor

from specdec.kernels import few_rows
from specdec.kernels.launch import launch_options

MOST_ELEMENTWISE_ROWS = 8


def tile_rows(rows: int) -> int:
    """Rows of a tile for so many rows: 1 to 8 element by element, or 16 to 64 through the matrix unit."""
    if rows <= MOST_ELEMENTWISE_ROWS:
        return triton.next_power_of_2(rows)
    return min(64, max(16, triton.next_power_of_2(rows)))


@dataclass(frozen=True)
class Blocks:
    """How one product is cut."""

    block_m: int
    """See `tile_rows`."""
    block_n: int
    """Columns of one accumulator."""
    block_k: int
    num_warps: int
    num_stages: int

    @staticmethod
    def choose(rows: int, size: int, columns: int, accumulators: int, element_size: int) -> Blocks:
        """Enough programs to keep all multiprocessors reading, and enough bytes in flight in each.

        Rules of thumb from measurements on an H200 (docs/explanation/performance.md).
        """
        block_m = tile_rows(rows)
        if block_m < 16 and size <= 2048:
            # One warp holds whole weight rows in its registers: no loop, and no barrier to add up.
            whole = triton.next_power_of_2(size)
            block_n = max(1, 4096 // (accumulators * whole)) if columns > 16384 else max(1, 2048 // whole, 2 // block_m)
            return Blocks(block_m, min(block_n, 4), whole, num_warps=1, num_stages=1)
        if block_m < 16:
            block_n, num_warps, num_stages = (
                (16, 8, 4) if columns > 16384 else (8, 4, 4) if columns > 8192 else (4, 4, 6)
            )
            return Blocks(block_m, max(1, block_n // block_m), 512 // max(1, block_m // 4), num_warps, num_stages)
        block_k = min(128, max(16, triton.next_power_of_2(size)))
        # A program takes at least 16 columns; wide products take wider tiles, so that the rows are read less often.
        block_n = 16
        while block_n < 64 // accumulators and columns // (2 * block_n) >= 128:
            block_n *= 2
        stage = (accumulators * block_n + block_m) * block_k * element_size
        return Blocks(block_m, block_n, block_k, num_warps=4, num_stages=max(2, min(6, 96 * 1024 // stage)))

    def launch(self, pdl: bool) -> dict[str, int | bool]:
        """What a kernel is told of it."""
        options: dict[str, int | bool] = dict(
            BLOCK_M=self.block_m,
            BLOCK_N=self.block_n,
            BLOCK_K=self.block_k,
            STAGES=self.num_stages,
            MMA=self.block_m >= 16,
            num_warps=self.num_warps,
        )
        return options | launch_options(pdl)


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of every position, one column for each pair `(c, c + d/2)` of channels."""

    cos: Float[Tensor, "positions half"]
    sin: Float[Tensor, "positions half"]


@dataclass(frozen=True)
class Stream:
    """The residual stream, ready for the norm in front of the next product."""

    x: Float[Tensor, "n d"]
    scaled: Float[Tensor, "n d"]
    """`x · g` for the weight `g` of the next norm."""
    squares: Float[Tensor, "n parts"]
    """Sums of squares of each row's `x`, in parts."""

    def norm_options(self) -> dict[str, int]:
        """What a kernel is told of the parts."""
        parts = self.squares.shape[1]
        return dict(PARTS=parts, PARTS_PADDED=triton.next_power_of_2(parts))


def embed(
    tokens: Int[Tensor, " n"], table: Float[Tensor, "v d"], norm: Float[Tensor, " d"], pdl: bool = False
) -> Stream:
    """Embeddings of some tokens, as a stream whose next norm has the weight `norm`."""
    rows, size = len(tokens), table.shape[1]
    x, scaled = (torch.empty(rows, size, dtype=table.dtype, device=table.device) for _ in range(2))
    squares = torch.empty(rows, 1, dtype=torch.float32, device=table.device)
    padded = triton.next_power_of_2(size)
    few_rows.embed_rows[(rows,)](
        tokens, table, norm, x, scaled, squares, SIZE=size, PADDED=padded, num_warps=4, **launch_options(pdl)
    )
    return Stream(x, scaled, squares)


def project_heads(
    stream: Stream,
    eps: float,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor, Tensor, Tensor] | None,
    rotation: Rotation,
    positions: Int[Tensor, " n"],
    blocks: Blocks | None = None,
    pdl: bool = False,
) -> tuple[Float[Tensor, "n heads dh"], Float[Tensor, "n h dh"], Float[Tensor, "n h dh"]]:
    """Norm, Q, K and V projections and the rotation of Q and K in one launch."""
    x = stream.scaled
    rows, size = x.shape
    half = rotation.cos.shape[1]
    heads, kv_heads = (weight.shape[0] // (2 * half) for weight in weights[:2])
    q, k, v = (torch.empty(rows, h, 2 * half, dtype=x.dtype, device=x.device) for h in (heads, kv_heads, kv_heads))
    blocks = blocks or Blocks.choose(rows, size, (heads + 2 * kv_heads) * half, 2, x.element_size())
    block_n = next(b for b in (32, 16, 8, 4, 2, 1) if b <= blocks.block_n and half % b == 0)
    few_rows.project_heads[((heads + 2 * kv_heads) * (half // block_n), triton.cdiv(rows, blocks.block_m))](
        x,
        stream.squares,
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
        **stream.norm_options(),
        **(blocks.launch(pdl) | {"BLOCK_N": block_n}),
    )
    return q, k, v


def gate(
    stream: Stream,
    eps: float,
    gate_weight: Float[Tensor, "i d"],
    up_weight: Float[Tensor, "i d"],
    blocks: Blocks | None = None,
    pdl: bool = False,
) -> Float[Tensor, "n i"]:
    """Norm, gate and up projections and SiLU in one launch."""
    x = stream.scaled
    rows, size = x.shape
    columns = gate_weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    blocks = blocks or Blocks.choose(rows, size, columns, 2, x.element_size())
    few_rows.gate[(triton.cdiv(columns, blocks.block_n), triton.cdiv(rows, blocks.block_m))](
        x,
        stream.squares,
        gate_weight,
        up_weight,
        out,
        rows,
        eps,
        SIZE=size,
        OUT=columns,
        **stream.norm_options(),
        **blocks.launch(pdl),
    )
    return out


def add_product(
    x: Float[Tensor, "n k"],
    weight: Float[Tensor, "d k"],
    residual: Stream,
    next_norm: Float[Tensor, " d"],
    blocks: Blocks | None = None,
    pdl: bool = False,
) -> Stream:
    """`residual + x weight`, as a stream whose next norm has the weight `next_norm`, in one launch."""
    rows, size = x.shape
    columns = weight.shape[0]
    out, scaled = torch.empty_like(residual.x), torch.empty_like(residual.x)
    blocks = blocks or Blocks.choose(rows, size, columns, 1, x.element_size())
    tiles = triton.cdiv(columns, blocks.block_n)
    squares = torch.empty(rows, tiles, dtype=torch.float32, device=x.device)
    few_rows.linear[(tiles, triton.cdiv(rows, blocks.block_m))](
        x,
        squares,
        weight,
        residual.x,
        next_norm,
        out,
        scaled,
        squares,
        rows,
        0.0,
        SIZE=size,
        OUT=columns,
        PARTS=1,
        PARTS_PADDED=1,
        NORMED=False,
        RESIDUAL=True,
        **blocks.launch(pdl),
    )
    return Stream(out, scaled, squares)


def normed_product(
    stream: Stream, eps: float, weight: Float[Tensor, "o d"], blocks: Blocks | None = None, pdl: bool = False
) -> Float[Tensor, "n o"]:
    """`norm(x) weight` in one launch: the logits."""
    x = stream.scaled
    rows, size = x.shape
    columns = weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    blocks = blocks or Blocks.choose(rows, size, columns, 1, x.element_size())
    few_rows.linear[(triton.cdiv(columns, blocks.block_n), triton.cdiv(rows, blocks.block_m))](
        x,
        stream.squares,
        weight,
        x,
        x,
        out,
        x,
        stream.squares,
        rows,
        eps,
        SIZE=size,
        OUT=columns,
        NORMED=True,
        RESIDUAL=False,
        **stream.norm_options(),
        **blocks.launch(pdl),
    )
    return out


# -- twins ------------------------------------------------------------------------------------------------------------


def stream_naive(x: Float[Tensor, "n d"], norm: Float[Tensor, " d"]) -> Stream:
    """A stream of rows that are there already; also the twin of `embed` behind a look-up."""
    return Stream(x, x * norm, x.double().square().sum(1, keepdim=True).float())


def normed_naive(stream: Stream, eps: float) -> Float[Tensor, "n d"]:
    """What the norm gives."""
    mean = stream.squares.sum(1, keepdim=True) / stream.x.shape[1]
    return stream.scaled * torch.rsqrt(mean + eps).to(stream.scaled.dtype)


def project_heads_naive(
    stream: Stream,
    eps: float,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor, Tensor, Tensor] | None,
    rotation: Rotation,
    positions: Int[Tensor, " n"],
) -> tuple[Float[Tensor, "n heads dh"], Float[Tensor, "n h dh"], Float[Tensor, "n h dh"]]:
    """The twin of `project_heads`."""
    half = rotation.cos.shape[1]
    normed = normed_naive(stream, eps)
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
    stream: Stream, eps: float, gate_weight: Float[Tensor, "i d"], up_weight: Float[Tensor, "i d"]
) -> Float[Tensor, "n i"]:
    """The twin of `gate`."""
    normed = normed_naive(stream, eps)
    return F.silu(F.linear(normed, gate_weight)) * F.linear(normed, up_weight)


def add_product_naive(
    x: Float[Tensor, "n k"], weight: Float[Tensor, "d k"], residual: Stream, next_norm: Float[Tensor, " d"]
) -> Stream:
    """The twin of `add_product`."""
    return stream_naive(residual.x + F.linear(x, weight), next_norm)


def normed_product_naive(stream: Stream, eps: float, weight: Float[Tensor, "o d"]) -> Float[Tensor, "n o"]:
    """The twin of `normed_product`."""
    return F.linear(normed_naive(stream, eps), weight)
