"""Triton programs of `skinny_linear`: products of a few rows with a large weight.

Two forms share the code: with `MMA`, tiles of at least 16 rows go through the matrix unit; without, up to 8 rows are
multiplied element by element, which needs neither shared memory nor barriers before the end.

With `PDL` (see `launch`) a program asks for its weights while the kernel in front of it still runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.launch import let_next_start, wait_for_inputs


@triton.jit
def _ask_for(
    weight_ptr, column, inside, SIZE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr
):
    """Bring the start of some weight rows into the L2 cache."""
    if PDL:
        line = tl.arange(0, LINES) * LINE
        at = column[:, None] * SIZE + tl.minimum(line, SIZE - 1)[None, :]
        address = (weight_ptr + at).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MMA: tl.constexpr):
    if MMA:
        return tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        return tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)


@triton.jit
def _add_product(x, weight, total, MMA: tl.constexpr):
    if MMA:
        return tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    else:
        return total + x.to(tl.float32)[:, None, :] * weight.to(tl.float32)[None, :, :]


@triton.jit
def _finish(total, MMA: tl.constexpr):
    if MMA:
        return total
    else:
        return tl.sum(total, 2)


@triton.jit
def _rows_times(x_ptr, weight, rows, k, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Products of the tile's rows with weights held in registers, row by row."""
    member = tl.arange(0, BLOCK_M)
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.static_range(BLOCK_M):
        row = tl.program_id(1) * BLOCK_M + i
        x = tl.load(x_ptr + row * SIZE + k, mask=k < tl.where(row < rows, SIZE, 0), other=0.0)
        column_sums = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        product = tl.where((member == i)[:, None], column_sums[None, :], product)
    return product


@triton.jit
def _norm_factor(squares_ptr, row, exists, eps, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, SIZE: tl.constexpr):
    """1 / rms of each row, from the partial sums of squares that the kernel before left."""
    part = tl.arange(0, PARTS_PADDED)
    mask = exists[:, None] & (part < PARTS)[None, :]
    squares = tl.load(squares_ptr + row[:, None] * PARTS + part[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / SIZE + eps)


@triton.jit
def embed_rows(
    tokens_ptr,
    table_ptr,
    norm_ptr,
    x_ptr,
    scaled_ptr,
    squares_ptr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program `row`: the token's embedding, times the next norm's weight, and its sum of squares."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    token = tl.load(tokens_ptr + row)
    x = tl.load(table_ptr + token * SIZE + column, mask=inside, other=0.0)
    tl.store(x_ptr + row * SIZE + column, x, mask=inside)
    tl.store(scaled_ptr + row * SIZE + column, (x * norm).to(scaled_ptr.dtype.element_ty), mask=inside)
    wide = x.to(tl.float32)
    tl.store(squares_ptr + row, tl.sum(wide * wide, 0))


@triton.jit
def project_heads(
    scaled_ptr,
    squares_ptr,
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
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program `(part of a head, tile of rows)`: the columns `c` and `c + HALF` of a head, which the rotation mixes."""
    let_next_start(PDL)
    pieces: tl.constexpr = HALF // BLOCK_N
    head = tl.program_id(0) // pieces
    low = (tl.program_id(0) % pieces) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < rows
    weight, bias, out, count, own = q_weight_ptr, q_bias_ptr, q_out_ptr, HEADS, head
    if head >= HEADS + KV_HEADS:
        weight, bias, out, count, own = v_weight_ptr, v_bias_ptr, v_out_ptr, KV_HEADS, head - HEADS - KV_HEADS
    elif head >= HEADS:
        weight, bias, out, count, own = k_weight_ptr, k_bias_ptr, k_out_ptr, KV_HEADS, head - HEADS
    column = own * 2 * HALF + low
    if SIZE <= BLOCK_K:
        k = tl.arange(0, BLOCK_K)
        mask = (k < SIZE)[None, :]
        at = column[:, None] * SIZE + k[None, :]
        first_weight = tl.load(weight + at, mask=mask, other=0.0)
        second_weight = tl.load(weight + at + HALF * SIZE, mask=mask, other=0.0)
        wait_for_inputs(PDL)
        if MMA:
            x = tl.load(scaled_ptr + row[:, None] * SIZE + k[None, :], mask=exists[:, None] & mask, other=0.0)
            one = _add_product(x, first_weight, _zeros(BLOCK_M, BLOCK_N, BLOCK_K, True), True)
            two = _add_product(x, second_weight, _zeros(BLOCK_M, BLOCK_N, BLOCK_K, True), True)
        else:
            one = _rows_times(scaled_ptr, first_weight, rows, k, SIZE, BLOCK_M, BLOCK_N)
            two = _rows_times(scaled_ptr, second_weight, rows, k, SIZE, BLOCK_M, BLOCK_N)
    else:
        first = _zeros(BLOCK_M, BLOCK_N, BLOCK_K, MMA)
        second = _zeros(BLOCK_M, BLOCK_N, BLOCK_K, MMA)
        _ask_for(weight, column, column >= 0, SIZE, 8, 64, PDL)
        _ask_for(weight + HALF * SIZE, column, column >= 0, SIZE, 8, 64, PDL)
        wait_for_inputs(PDL)
        for start in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            mask = (k < SIZE)[None, :]
            x = tl.load(scaled_ptr + row[:, None] * SIZE + k[None, :], mask=exists[:, None] & mask, other=0.0)
            at = column[:, None] * SIZE + k[None, :]
            first_weight = tl.load(weight + at, mask=mask, other=0.0)
            second_weight = tl.load(weight + at + HALF * SIZE, mask=mask, other=0.0)
            first = _add_product(x, first_weight, first, MMA)
            second = _add_product(x, second_weight, second, MMA)
        one = _finish(first, MMA)
        two = _finish(second, MMA)
    factor = _norm_factor(squares_ptr, row, exists, eps, PARTS, PARTS_PADDED, SIZE)
    one *= factor[:, None]
    two *= factor[:, None]
    if BIASED:
        one += tl.load(bias + column)[None, :].to(tl.float32)
        two += tl.load(bias + column + HALF)[None, :].to(tl.float32)
    if head < HEADS + KV_HEADS:
        position = tl.load(positions_ptr + row, mask=exists, other=0)
        angle = position[:, None] * HALF + low[None, :]
        cos = tl.load(cos_ptr + angle).to(tl.float32)
        sin = tl.load(sin_ptr + angle).to(tl.float32)
        turned = one * cos - two * sin
        two = two * cos + one * sin
        one = turned
    out_at = row.to(tl.int64)[:, None] * count * 2 * HALF + column[None, :]
    tl.store(out + out_at, one.to(out.dtype.element_ty), mask=exists[:, None])
    tl.store(out + out_at + HALF, two.to(out.dtype.element_ty), mask=exists[:, None])


@triton.jit
def gate(
    scaled_ptr,
    squares_ptr,
    gate_ptr,
    up_ptr,
    out_ptr,
    rows,
    eps,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program `(tile of columns, tile of rows)`: `silu(norm(x) gate) · norm(x) up`."""
    let_next_start(PDL)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < rows
    inside = column < OUT
    if SIZE <= BLOCK_K:
        k = tl.arange(0, BLOCK_K)
        mask = (k < SIZE)[None, :]
        at = column[:, None] * SIZE + k[None, :]
        gate_weight = tl.load(gate_ptr + at, mask=mask & inside[:, None], other=0.0)
        up_weight = tl.load(up_ptr + at, mask=mask & inside[:, None], other=0.0)
        wait_for_inputs(PDL)
        if MMA:
            x = tl.load(scaled_ptr + row[:, None] * SIZE + k[None, :], mask=exists[:, None] & mask, other=0.0)
            one = _add_product(x, gate_weight, _zeros(BLOCK_M, BLOCK_N, BLOCK_K, True), True)
            two = _add_product(x, up_weight, _zeros(BLOCK_M, BLOCK_N, BLOCK_K, True), True)
        else:
            one = _rows_times(scaled_ptr, gate_weight, rows, k, SIZE, BLOCK_M, BLOCK_N)
            two = _rows_times(scaled_ptr, up_weight, rows, k, SIZE, BLOCK_M, BLOCK_N)
    else:
        first = _zeros(BLOCK_M, BLOCK_N, BLOCK_K, MMA)
        second = _zeros(BLOCK_M, BLOCK_N, BLOCK_K, MMA)
        _ask_for(gate_ptr, tl.minimum(column, OUT - 1).to(tl.int64), inside, SIZE, 8, 64, PDL)
        _ask_for(up_ptr, tl.minimum(column, OUT - 1).to(tl.int64), inside, SIZE, 8, 64, PDL)
        wait_for_inputs(PDL)
        for start in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            mask = (k < SIZE)[None, :]
            x = tl.load(scaled_ptr + row[:, None] * SIZE + k[None, :], mask=exists[:, None] & mask, other=0.0)
            at = column.to(tl.int64)[:, None] * SIZE + k[None, :]
            gate_weight = tl.load(gate_ptr + at, mask=mask & inside[:, None], other=0.0)
            up_weight = tl.load(up_ptr + at, mask=mask & inside[:, None], other=0.0)
            first = _add_product(x, gate_weight, first, MMA)
            second = _add_product(x, up_weight, second, MMA)
        one = _finish(first, MMA)
        two = _finish(second, MMA)
    factor = _norm_factor(squares_ptr, row, exists, eps, PARTS, PARTS_PADDED, SIZE)
    one *= factor[:, None]
    two *= factor[:, None]
    result = one / (1.0 + tl.exp(-one)) * two
    at = row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=exists[:, None] & inside[None, :])


@triton.jit
def linear(
    x_ptr,
    squares_ptr,
    weight_ptr,
    residual_ptr,
    next_norm_ptr,
    out_ptr,
    scaled_ptr,
    next_squares_ptr,
    rows,
    eps,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    NORMED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program `(columns, rows)`: `norm(x) weight`; or `residual + x weight`, made ready for the next norm."""
    let_next_start(PDL)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < rows
    inside = column < OUT
    if SIZE <= BLOCK_K:
        k = tl.arange(0, BLOCK_K)
        mask = (k < SIZE)[None, :]
        at = column.to(tl.int64)[:, None] * SIZE + k[None, :]
        weight = tl.load(weight_ptr + at, mask=mask & inside[:, None], other=0.0)
        wait_for_inputs(PDL)
        if MMA:
            x = tl.load(x_ptr + row[:, None] * SIZE + k[None, :], mask=exists[:, None] & mask, other=0.0)
            product = _add_product(x, weight, _zeros(BLOCK_M, BLOCK_N, BLOCK_K, True), True)
        else:
            product = _rows_times(x_ptr, weight, rows, k, SIZE, BLOCK_M, BLOCK_N)
    else:
        total = _zeros(BLOCK_M, BLOCK_N, BLOCK_K, MMA)
        _ask_for(weight_ptr, tl.minimum(column, OUT - 1).to(tl.int64), inside, SIZE, 16, 64, PDL)
        wait_for_inputs(PDL)
        for start in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            mask = (k < SIZE)[None, :]
            x = tl.load(x_ptr + row[:, None] * SIZE + k[None, :], mask=exists[:, None] & mask, other=0.0)
            at = column.to(tl.int64)[:, None] * SIZE + k[None, :]
            weight = tl.load(weight_ptr + at, mask=mask & inside[:, None], other=0.0)
            total = _add_product(x, weight, total, MMA)
        product = _finish(total, MMA)
    if NORMED:
        product *= _norm_factor(squares_ptr, row, exists, eps, PARTS, PARTS_PADDED, SIZE)[:, None]
    at = row.to(tl.int64)[:, None] * OUT + column[None, :]
    wanted = exists[:, None] & inside[None, :]
    if RESIDUAL:
        product += tl.load(residual_ptr + at, mask=wanted, other=0.0).to(tl.float32)
    rounded = product.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, rounded, mask=wanted)
    if RESIDUAL:
        norm = tl.load(next_norm_ptr + column, mask=inside, other=0.0)
        scaled = (rounded * norm[None, :]).to(scaled_ptr.dtype.element_ty)
        tl.store(scaled_ptr + at, scaled, mask=wanted)
        wide = tl.where(wanted, rounded.to(tl.float32), 0.0)
        tl.store(next_squares_ptr + row * tl.num_programs(0) + tl.program_id(0), tl.sum(wide * wide, 1), mask=exists)
