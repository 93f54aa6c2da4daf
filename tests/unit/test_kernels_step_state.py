"""The book-keeping kernels against their twins, and against the window's own properties."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.kernel_cases import DEVICE, random_window

pytest.importorskip("triton")

from specdec.kernels.step_state import (
    HEADER,
    StepBuffers,
    open_window,
    open_window_naive,
    settle_step,
    settle_step_naive,
)


def buffers_of(window) -> StepBuffers:
    rows, width = window.tokens.shape
    buffers = StepBuffers.empty(rows, width, torch.device(DEVICE))
    buffers.tokens.copy_(window.tokens)
    buffers.parents.copy_(window.parents)
    buffers.num_nodes.copy_(window.num_nodes)
    buffers.lengths.copy_(window.lengths)
    buffers.roots.copy_(window.tokens[:, 0])
    buffers.tokens[:, 0] = -5
    return buffers


def assert_same(a: StepBuffers, b: StepBuffers):
    for name, value in vars(a).items():
        assert torch.equal(value, getattr(b, name)), name


@pytest.mark.parametrize("width", [1, 2, 3, 8, 31, 64])
@pytest.mark.parametrize("chain", [True, False])
def test_open_window(width, chain):
    window = random_window([5, 0, 70], width, 3, chain, num_nodes=[width, 1, max(1, width - 1)], vocab=90)
    buffers = buffers_of(window)
    twin = copy.deepcopy(buffers)
    open_window(buffers)
    open_window_naive(twin)
    assert_same(buffers, twin)
    assert torch.equal(buffers.tokens, window.tokens)
    assert torch.equal(buffers.positions, window.positions)
    assert torch.equal(buffers.ancestor_bits, window.ancestor_bits)
    assert torch.equal(buffers.depths, window.depths)


def test_settle_step():
    window = random_window([5, 9, 3, 4], 6)
    buffers = buffers_of(window)
    buffers.limits.copy_(torch.tensor([10, 3, 0, 9]))
    buffers.counts.copy_(torch.tensor([1, 2, 3, 4]))
    twin = copy.deepcopy(buffers)
    path = torch.tensor([[0, 2, 5, -1, -1, -1], [0, 1, 2, -1, -1, -1], [-1] * 6, [0] + [-1] * 5], device=DEVICE)
    num_kept = torch.tensor([3, 3, 0, 1], device=DEVICE)
    next_tokens = torch.tensor([40, 41, 42, -1], device=DEVICE)
    stopped = torch.tensor([0, 1, 1, 0], dtype=torch.int8, device=DEVICE)
    settle_step(buffers, path, num_kept, next_tokens, stopped)
    settle_step_naive(twin, path, num_kept, next_tokens, stopped)
    assert_same(buffers, twin)
    assert buffers.limits.tolist() == [7, 0, 0, 0]
    assert buffers.lengths.tolist() == [8, 12, 3, 5]
    assert buffers.counts.tolist() == [4, 5, 3, 5]
    roots = window.tokens[:, 0].tolist()
    assert buffers.roots.tolist() == [40, 41, roots[2], roots[3]]
    assert buffers.record[0, :HEADER].tolist() == [3, 40, 0, 6]
