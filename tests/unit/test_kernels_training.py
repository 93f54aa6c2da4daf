"""The kernels of training and of writing text, against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from tests.kernel_cases import DEVICE, relative_error

pytest.importorskip("triton")

from specdec.kernels.lockstep_attention import attend_lockstep
from specdec.kernels.sample_rows import sample_rows
from specdec.kernels.soft_cross_entropy import row_statistics, soft_cross_entropy_


@pytest.mark.parametrize("num_keys", [1, 63, 64, 70])
def test_lockstep_attention_reads_the_first_keys_only(num_keys: int):
    query, keys, values = (torch.randn(shape, device=DEVICE) for shape in ((3, 6, 16), (3, 2, 80, 16), (3, 2, 80, 16)))
    keys[:, :, num_keys:], values[:, :, num_keys:] = math.nan, math.nan
    found = attend_lockstep(query, keys, values, torch.tensor(num_keys, dtype=torch.int32, device=DEVICE), 0.25)
    k, v = keys[:, :, :num_keys], values[:, :, :num_keys]
    wanted = F.scaled_dot_product_attention(query[:, :, None], k, v, scale=0.25, enable_gqa=True)[:, :, 0]
    assert relative_error(found, wanted) < 1e-6


def test_temperature_0_is_the_argmax():
    logits = torch.randn(6, 2500, device=DEVICE)
    seed = torch.tensor(3, device=DEVICE)
    assert torch.equal(sample_rows(logits, torch.zeros(6, device=DEVICE), -3.5, seed), logits.argmax(-1))


def test_samples_follow_the_distribution_and_min_p():
    row = torch.full((1, 2100), -20.0, device=DEVICE)
    row[0, 5], row[0, 2090], row[0, 9] = 2.0, 1.0, -2.0
    rows, temperature = 80, 0.8
    arguments = (row.expand(rows, -1), torch.full((rows,), temperature, device=DEVICE), math.log(0.03))
    counts = sample_rows(*arguments, torch.tensor(7, device=DEVICE)).bincount(minlength=2100).cpu()
    share = float(torch.tensor([2.0, 1.0]).div(temperature).softmax(0)[0])
    assert counts[5] + counts[2090] == rows
    assert abs(int(counts[5]) / rows - share) < 4 * math.sqrt(share * (1 - share) / rows)
    other = sample_rows(*arguments, torch.tensor(8, device=DEVICE))
    assert not torch.equal(sample_rows(*arguments, torch.tensor(7, device=DEVICE)), other)


@pytest.mark.parametrize("vocab", [100, 2048, 5000])
def test_soft_cross_entropy_and_its_gradient(vocab: int):
    student = torch.randn(7, vocab, device=DEVICE, requires_grad=True)
    teacher, weights = torch.randn(4, vocab, device=DEVICE) * 3, torch.rand(7, device=DEVICE)
    rows, sharpness = torch.tensor([0, 1, 2, 3, 3, 2, 1], device=DEVICE), 1.5
    wanted = -((sharpness * teacher[rows]).softmax(-1) * student.log_softmax(-1)).sum(-1) * weights
    wanted.sum().backward()
    lse, best = row_statistics(teacher, sharpness)
    assert torch.equal(best, teacher.argmax(-1))
    assert relative_error(lse, (sharpness * teacher).logsumexp(-1)) < 1e-6
    logits = student.detach().clone()
    loss, chosen = soft_cross_entropy_(logits, teacher, rows, lse, sharpness, weights)
    assert relative_error(loss, wanted.detach()) < 1e-5
    assert relative_error(logits, student.grad) < 1e-5
    assert torch.equal(chosen, student.argmax(-1))
