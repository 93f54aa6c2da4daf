"""Norms, rotation and gating between matrix products, against their twins."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_cases import DEVICE, relative_error

pytest.importorskip("triton")

from specdec.kernels.layer_ops import (
    add_norm,
    add_norm_naive,
    rotate_heads,
    rotate_heads_naive,
    silu_mul,
    silu_mul_naive,
)
from specdec.kernels.skinny_linear import Rotation


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("size", [16, 100])
def test_add_norm(added, size):
    x, norm = draw(3, size) * 5, draw(size)
    y = draw(3, size, seed=2) if added else None
    for found, expected in zip(add_norm(x, y, norm, 1e-5), add_norm_naive(x, y, norm, 1e-5), strict=True):
        assert relative_error(found, expected) < 1e-6


def test_add_norm_rounds_as_the_models_norm_does():
    x, y, norm = (
        draw(4, 64, dtype=torch.float16),
        draw(4, 64, seed=1, dtype=torch.float16),
        draw(64, dtype=torch.float16),
    )
    total, normed = add_norm(x, y, norm, 1e-5)
    assert torch.equal(total, x + y)
    assert relative_error(normed, add_norm_naive(x.double(), y.double(), norm.double(), 1e-5)[1]) < 2e-3


@pytest.mark.parametrize("half", [8, 12])
def test_heads_inside_a_merged_projection(half):
    angles = torch.arange(40.0)[:, None] * torch.linspace(1, 0.1, half)
    rotation = Rotation(angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    merged = draw(5, (4 + 2 + 2) * 2 * half)
    q, k, _ = merged.split([8 * half, 4 * half, 4 * half], dim=1)
    positions = torch.tensor([0, 3, 39, 7, 7], device=DEVICE)
    found = rotate_heads(q, k, rotation, positions)
    for one, other in zip(found, rotate_heads_naive(q, k, rotation, positions), strict=True):
        assert one.is_contiguous() and relative_error(one, other) < 1e-6


@pytest.mark.parametrize("size", [30, 3000])
def test_silu_mul(size):
    merged = draw(3, 2 * size) * 4
    gate, up = merged.chunk(2, dim=1)
    assert relative_error(silu_mul(gate, up), silu_mul_naive(gate, up)) < 1e-6
