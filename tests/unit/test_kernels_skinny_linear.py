"""Matrix products of few rows, with norm, rotation, gate and residual, against their twins."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernel_cases import DEVICE, relative_error

pytest.importorskip("triton")

from specdec.kernels.skinny_linear import (
    Blocks,
    Rotation,
    Stream,
    add_product,
    add_product_naive,
    embed,
    gate,
    gate_naive,
    normed_product,
    normed_product_naive,
    project_heads,
    project_heads_naive,
    stream_naive,
)

EPS = 1e-5


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def rotation_of(half):
    angles = torch.arange(50.0)[:, None] * 10000 ** -(torch.arange(half) / half)
    return Rotation(angles.cos().to(DEVICE), angles.sin().to(DEVICE))


def stream_of(rows, size, parts=1):
    x = draw(rows, size) * 3
    stream = stream_naive(x, draw(size))
    # Squares come in as many parts as the kernel before had programs.
    shares = torch.rand(rows, parts, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return Stream(stream.x, stream.scaled, stream.squares * shares / shares.sum(1, keepdim=True))


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("half", [16, 24])
def test_project_heads(rows, biased, half):
    size, heads, kv_heads = 48, 4, 2
    weights = tuple(draw(h * 2 * half, size, seed=h) for h in (heads, kv_heads, kv_heads + 1))[:2]
    weights = (*weights, draw(kv_heads * 2 * half, size, seed=9))
    biases = tuple(draw(len(w), seed=1) for w in weights) if biased else None
    positions = torch.arange(rows, device=DEVICE) * 2 % 50
    args = (stream_of(rows, size, 5), EPS, weights, biases, rotation_of(half), positions)
    for found, expected in zip(project_heads(*args), project_heads_naive(*args), strict=True):
        assert found.shape == expected.shape
        assert relative_error(found, expected) < 2e-6


@pytest.mark.parametrize(("rows", "columns"), [(1, 48), (4, 40), (20, 40), (70, 16)])
def test_gate(rows, columns):
    args = (stream_of(rows, 64), EPS, draw(columns, 64, seed=1), draw(columns, 64, seed=2))
    assert relative_error(gate(*args), gate_naive(*args)) < 2e-6


@pytest.mark.parametrize(("rows", "columns"), [(1, 101), (2, 101), (33, 32)])
@pytest.mark.parametrize("block_k", [32, 128])
def test_normed_product(rows, columns, block_k):
    blocks = dataclasses.replace(Blocks.choose(rows, 80, columns, 1, 4), block_k=block_k)
    args = (stream_of(rows, 80, 3), EPS, draw(columns, 80, seed=5))
    assert relative_error(normed_product(*args, blocks=blocks), normed_product_naive(*args)) < 2e-6


@pytest.mark.parametrize(("rows", "columns"), [(1, 100), (3, 48), (20, 100)])
@pytest.mark.parametrize("block_k", [32, 128])
def test_a_product_added_to_a_stream(rows, columns, block_k):
    blocks = dataclasses.replace(Blocks.choose(rows, 80, columns, 1, 4), block_k=block_k)
    args = (draw(rows, 80), draw(columns, 80, seed=5), stream_of(rows, columns), draw(columns, seed=8))
    found, expected = add_product(*args, blocks=blocks), add_product_naive(*args)
    assert relative_error(found.x, expected.x) < 2e-6
    assert relative_error(found.scaled, expected.scaled) < 2e-6
    assert relative_error(found.squares.sum(1), expected.squares.sum(1)) < 2e-6


def test_embed():
    table, norm, tokens = draw(30, 48), draw(48), torch.tensor([7, 0, 29], device=DEVICE)
    found, expected = embed(tokens, table, norm), stream_naive(table[tokens], norm)
    assert torch.equal(found.x, expected.x) and torch.equal(found.scaled, expected.scaled)
    assert relative_error(found.squares, expected.squares) < 1e-6


def test_half_precision():
    stream = stream_naive(draw(4, 128, dtype=torch.float16), draw(128, dtype=torch.float16))
    weight = draw(64, 128, dtype=torch.float16)
    found = normed_product(stream, EPS, weight)
    exact = stream_naive(stream.x.double(), draw(128, dtype=torch.float16).double())
    assert found.dtype == torch.float16
    assert relative_error(found, normed_product_naive(exact, EPS, weight.double())) < 3e-3


def test_blocks_fit_the_product():
    for rows in (1, 3, 16, 64, 200):
        for size, columns in ((576, 576), (1536, 576), (4096, 14336), (4096, 128256)):
            blocks = Blocks.choose(rows, size, columns, 2, 2)
            assert blocks.block_m >= min(rows, 64)
            if blocks.block_m >= 16:
                assert (2 * blocks.block_n + blocks.block_m) * blocks.block_k * 2 * blocks.num_stages <= 200 * 1024
            else:
                assert 2 * blocks.block_m * blocks.block_n * blocks.block_k <= 16384
