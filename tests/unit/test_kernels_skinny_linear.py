"""Matrix products of few rows, with norm, rotation, gate and residual, against their twins."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_cases import DEVICE, relative_error

pytest.importorskip("triton")

from specdec.errors import ConfigError
from specdec.kernels.skinny_linear import (
    Blocks,
    Rotation,
    gate,
    gate_naive,
    linear,
    linear_naive,
    project_heads,
    project_heads_naive,
)

EPS = 1e-5


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def rotation_of(half):
    angles = torch.arange(50.0)[:, None] * 10000 ** -(torch.arange(half) / half)
    return Rotation(angles.cos().to(DEVICE), angles.sin().to(DEVICE))


@pytest.mark.parametrize("rows", [1, 5, 17])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("half", [16, 24])
def test_project_heads(rows, biased, half):
    size, heads, kv_heads = 48, 4, 2
    weights = tuple(draw(h * 2 * half, size, seed=h) for h in (heads, kv_heads, kv_heads + 1))[:2]
    weights = (*weights, draw(kv_heads * 2 * half, size, seed=9))
    biases = tuple(draw(len(w), seed=1) for w in weights) if biased else None
    positions = torch.arange(rows, device=DEVICE) * 2 % 50
    args = (draw(rows, size) * 3, draw(size), EPS, weights, biases, rotation_of(half), positions)
    for found, expected in zip(project_heads(*args), project_heads_naive(*args), strict=True):
        assert found.shape == expected.shape
        assert relative_error(found, expected) < 2e-6


@pytest.mark.parametrize(("rows", "columns"), [(1, 48), (20, 40), (70, 16)])
def test_gate(rows, columns):
    args = (draw(rows, 64), draw(64), EPS, draw(columns, 64, seed=1), draw(columns, 64, seed=2))
    assert relative_error(gate(*args), gate_naive(*args)) < 2e-6


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 101), (33, 32)])
def test_linear(normed, with_residual, rows, columns):
    options = dict(
        norm=draw(80) if normed else None, eps=EPS, residual=draw(rows, columns, seed=4) if with_residual else None
    )
    x, weight = draw(rows, 80), draw(columns, 80, seed=5)
    assert relative_error(linear(x, weight, **options), linear_naive(x, weight, **options)) < 2e-6


def test_half_precision():
    x, weight, norm = (
        draw(4, 128, dtype=torch.float16),
        draw(64, 128, dtype=torch.float16),
        draw(128, dtype=torch.float16),
    )
    found = linear(x, weight, norm=norm, eps=EPS)
    assert found.dtype == torch.float16
    assert relative_error(found, linear_naive(x.double(), weight.double(), norm=norm.double(), eps=EPS)) < 3e-3


def test_blocks_fit_the_product():
    for rows in (1, 16, 64, 200):
        for size, columns in ((576, 576), (1536, 576), (4096, 14336), (4096, 128256)):
            blocks = Blocks.choose(rows, size, columns, 2, 2)
            assert size % blocks.block_k == 0 and 16 <= blocks.block_m <= 64
            assert (2 * blocks.block_n + blocks.block_m) * blocks.block_k * 2 * blocks.num_stages <= 200 * 1024
    with pytest.raises(ConfigError, match="inner size 50"):
        Blocks.choose(1, 50, 16, 1, 2)
