"""The Triton tree attention against its twin in float64 and against the readable reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernel_cases import DEVICE, random_pages, random_window, relative_error

pytest.importorskip("triton")

from specdec.attention.fused import attend_fused
from specdec.attention.reference import AttentionRules, attend
from specdec.kernels.tiling import Tiling
from specdec.kernels.tree_attention import tree_attention, tree_attention_naive
from specdec.types import KVView, PrefixLayout

SMALL = Tiling(block_m=16, block_n=16, splits=3, num_warps=4, num_stages=1)


def make_case(
    lengths, width, heads=6, kv_heads=2, size_k=16, size_v=16, page_size=16, dtype=torch.float32, seed=0, **more
):
    window = random_window(lengths, width, seed, **more)
    generator = torch.Generator().manual_seed(seed + 1)
    k_pages, table, device_lengths = random_pages(lengths, page_size, (kv_heads, size_k), dtype, seed + 2)
    v_pages, _, _ = random_pages(lengths, page_size, (kv_heads, size_v), dtype, seed + 2)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    return dict(
        # As Hugging Face gives them: heads and nodes transposed, so not contiguous.
        query=draw(len(lengths), width, heads, size_k).transpose(1, 2),
        k_pages=k_pages[0],
        v_pages=v_pages[0],
        k=draw(len(lengths), width, kv_heads, size_k),
        v=draw(len(lengths), width, kv_heads, size_v),
        page_table=table,
        lengths=device_lengths,
        positions=window.positions,
        ancestor_bits=None if window.is_chain else window.ancestor_bits,
        scaling=size_k**-0.5,
    ), window


def assert_equals_twin(case, tolerance=2e-6, tiling=SMALL):
    found = tree_attention(**case, tiling=tiling)
    assert not found.isnan().any()
    assert relative_error(found, tree_attention_naive(**case)) < tolerance


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("width", [1, 7])
def test_equals_its_twin_on_trees(page_size, width):
    case, _ = make_case([37, 0, 5], width, page_size=page_size)
    assert_equals_twin(case)


@pytest.mark.parametrize("lengths", [[0], [1], [15, 16, 17], [47, 48, 49], [200]])
def test_lengths_around_block_and_split_borders(lengths):
    case, _ = make_case(lengths, 3, heads=2, kv_heads=2)
    assert_equals_twin(case)


def test_sixty_four_nodes_use_every_bit():
    case, window = make_case([9], 64, heads=2, kv_heads=1, vocab=80)
    assert int(window.ancestor_bits[0, 63]) < 0, "bit 63 must be set, which makes the packed mask negative"
    assert_equals_twin(case)


@pytest.mark.parametrize("width", [5, 70])
def test_chains_need_no_bits_and_may_be_wide(width):
    case, _ = make_case([21], width, chain=True, heads=2, kv_heads=1, vocab=80)
    assert_equals_twin(case)


@pytest.mark.parametrize("sliding_window", [1, 4, 20])
@pytest.mark.parametrize("chain", [False, True])
def test_sliding_window(sliding_window, chain):
    case, _ = make_case([33, 2], 5, heads=2, chain=chain)
    assert_equals_twin(case | {"sliding_window": sliding_window})


def test_softcap_and_sinks():
    case, _ = make_case([33, 0], 3, heads=4)
    sinks = torch.linspace(-2, 3, 4, device=DEVICE)
    assert_equals_twin(case | {"softcap": 5.0})
    assert_equals_twin(case | {"sinks": sinks})
    assert_equals_twin(case | {"softcap": 0.7, "sinks": sinks, "sliding_window": 6})


@pytest.mark.parametrize(("size_k", "size_v"), [(8, 8), (24, 24), (80, 80), (24, 16), (16, 40)])
def test_head_sizes_that_are_no_powers_of_two(size_k, size_v):
    case, _ = make_case([19, 4], 4, size_k=size_k, size_v=size_v)
    assert_equals_twin(case)


def test_half_precision():
    case, _ = make_case([50, 3], 6, dtype=torch.float16)
    assert_equals_twin(case, tolerance=2e-3)


def test_scores_far_from_zero_do_not_overflow():
    case, _ = make_case([40], 4)
    assert_equals_twin(case | {"query": case["query"] * 300}, tolerance=1e-4)


def test_quantised_pages():
    case, _ = make_case([33, 7], 4)
    generator = torch.Generator().manual_seed(5)
    shape = case["k_pages"].shape
    integers = [torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8) for _ in range(2)]
    scales = [torch.rand(shape[:3], generator=generator) / 50 for _ in range(2)]
    (k_pages, v_pages), (k_scales, v_scales) = ([t.to(DEVICE) for t in both] for both in (integers, scales))
    assert_equals_twin(case | dict(k_pages=k_pages, v_pages=v_pages, k_scales=k_scales, v_scales=v_scales))


@pytest.mark.parametrize("splits", [1, 7, 15])
def test_the_number_of_splits_changes_nothing_but_rounding(splits):
    case, _ = make_case([100, 12], 3)
    assert_equals_twin(case, tiling=dataclasses.replace(SMALL, splits=splits))


def test_default_tiling():
    case, _ = make_case([100, 12], 8)
    assert_equals_twin(case, tiling=None)


def test_equals_the_reference_on_ragged_windows():
    lengths, width = [30, 4, 0], 6
    case, window = make_case(lengths, width, num_nodes=[6, 3, 1])
    layout = PrefixLayout(case["page_table"], case["lengths"], tuple(lengths), None)
    view = KVView(case["k_pages"], case["v_pages"], case["k"], case["v"], layout)
    rules = AttentionRules(case["scaling"], sliding_window=7)
    expected = attend(case["query"], view, window, rules)
    found = attend_fused(case["query"], view, window, rules)
    for row, count in enumerate([6, 3, 1]):
        assert relative_error(found[row, :count], expected[row, :count]) < 2e-6
    assert not found.isnan().any()
