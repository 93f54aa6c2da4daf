"""One launch commits the kept rows of every layer, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_cases import DEVICE, random_pages

pytest.importorskip("triton")

from specdec.errors import ConfigError
from specdec.kernels.commit import CommitTable, commit_rows, commit_rows_naive


def make_case(page_size=4, dtype=torch.float32, layers=3, row=(2, 5), lengths=(6, 0, 9), width=7):
    generator = torch.Generator().manual_seed(1)
    pages, table, starts = random_pages(list(lengths), page_size, row, dtype, layers=layers, room=width)
    staged = torch.randn(layers, len(lengths), width, *row, generator=generator).to(DEVICE, dtype)
    path = torch.tensor([[0, 2, 3, 6, -1, -1, -1], [0, -1, -1, -1, -1, -1, -1], [0, 1, 2, 3, 4, 5, 6]], device=DEVICE)
    num_kept = torch.tensor([4, 1, 7], device=DEVICE)
    return pages, staged, table, starts, path, num_kept


def run_both(pages, staged, table, starts, path, num_kept):
    expected = pages.clone()
    commit_rows_naive(list(staged), list(expected), table, starts, path, num_kept)
    planes = CommitTable(len(staged), staged[0].element_size(), pages.shape[2], pages.device)
    planes.fill(list(staged), list(pages))
    commit_rows(planes, table, starts, path, num_kept)
    return pages, expected


def equal_bits(a, b):
    return torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0)) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_its_twin_bit_for_bit(page_size, dtype):
    before = make_case(page_size, dtype)[0]
    pages, expected = run_both(*make_case(page_size, dtype))
    assert equal_bits(pages, expected)
    assert (pages.isnan() != before.isnan()).any(), "something must have been written"


def test_rejected_rows_never_touch_a_page():
    pages, staged, table, starts, path, num_kept = make_case()
    free_before = int(pages[:, :, :, 0, 0].isnan().sum())
    pages, _ = run_both(pages, staged, table, starts, path, num_kept)
    assert int(pages[:, :, :, 0, 0].isnan().sum()) == free_before - 3 * (4 + 1 + 7)


def test_rows_that_are_done_keep_nothing():
    pages, staged, table, starts, path, _ = make_case()
    before = pages.clone()
    pages, _ = run_both(pages, staged, table, starts, path, torch.zeros(3, dtype=torch.long, device=DEVICE))
    assert equal_bits(pages, before)


def test_long_rows_and_strided_sources():
    # Rows longer than one block of elements, staged as a slice of a wider projection.
    pages, _, table, starts, path, num_kept = make_case(layers=2, row=(9, 64))
    wide = torch.randn(2, 3, 7, 2 * 9 * 64, device=DEVICE)
    staged = wide[..., 9 * 64 :].unflatten(-1, (9, 64))
    pages, expected = run_both(pages, staged, table, starts, path, num_kept)
    assert equal_bits(pages, expected)


def test_planes_of_different_row_sizes_go_in_one_launch():
    pages, staged, table, starts, path, num_kept = make_case()
    narrow_pages, narrow, _, _, _, _ = make_case(row=(1, 3))
    both = [*pages, *narrow_pages]
    expected = [t.clone() for t in both]
    sources = [*staged, *narrow]
    commit_rows_naive(sources, expected, table, starts, path, num_kept)
    planes = CommitTable(6, 4, 4, pages.device)
    planes.fill(sources, both)
    commit_rows(planes, table, starts, path, num_kept)
    assert all(equal_bits(a, b) for a, b in zip(both, expected, strict=True))


def test_rows_that_are_not_one_run_are_refused():
    pages, staged, *_ = make_case()
    planes = CommitTable(3, 4, 4, pages.device)
    with pytest.raises(ConfigError, match="plane 0"):
        planes.fill([s.transpose(-1, -2) for s in staged], list(pages))
    with pytest.raises(ConfigError, match="element_size=3"):
        CommitTable(3, 3, 4, pages.device)
