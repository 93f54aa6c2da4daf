"""The kernels in bf16, at sizes of real models, against references in float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_cases import random_pages, random_window, relative_error

pytest.importorskip("triton")

from specdec.kernels.acceptance import NoiseRing, pick_tiles, picks_naive, walk, walk_naive
from specdec.kernels.commit import CommitTable, commit_rows, commit_rows_naive
from specdec.kernels.skinny_linear import (
    Rotation,
    add_product,
    add_product_naive,
    gate,
    gate_naive,
    normed_product,
    normed_product_naive,
    project_heads,
    project_heads_naive,
    stream_naive,
)
from specdec.kernels.tree_attention import tree_attention, tree_attention_naive

DTYPES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest relative errors."""

SHAPES = [(9, 3, 64), (24, 8, 128), (32, 8, 128)]


def draw(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def attention_case(lengths, width, heads, kv_heads, size, dtype, chain=False):
    window = random_window(lengths, width, 1, chain, vocab=500)
    k_pages, table, device_lengths = random_pages(lengths, 16, (kv_heads, size), dtype, seed=2)
    v_pages, _, _ = random_pages(lengths, 16, (kv_heads, size), dtype, seed=2)
    return dict(
        query=draw(len(lengths), width, heads, size, dtype=dtype).transpose(1, 2),
        k_pages=k_pages[0],
        v_pages=v_pages[0].flip(-1),
        k=draw(len(lengths), width, kv_heads, size, dtype=dtype, seed=1),
        v=draw(len(lengths), width, kv_heads, size, dtype=dtype, seed=2),
        page_table=table,
        lengths=device_lengths,
        positions=window.positions,
        ancestor_bits=None if chain else window.ancestor_bits,
        scaling=size**-0.5,
    )


def assert_attention(case, tolerance):
    found = tree_attention(**case)
    on_cpu = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in case.items()}
    assert relative_error(found.cpu(), tree_attention_naive(**on_cpu)) < tolerance


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize("width", [1, 8, 64])
def test_tree_attention(heads, kv_heads, size, width):
    lengths = [1000, 0, 77] if width == 1 else [300]
    assert_attention(attention_case(lengths, width, heads, kv_heads, size, torch.bfloat16), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tree_attention_in_other_types(dtype):
    assert_attention(attention_case([513, 16], 8, 8, 2, 64, dtype), DTYPES[dtype])


def test_tree_attention_with_everything():
    case = attention_case([500, 31], 16, 8, 4, 128, torch.bfloat16)
    sinks = draw(8, dtype=torch.float32)
    assert_attention(case | dict(sliding_window=100, softcap=3.0, sinks=sinks), 1e-2)


def test_wide_chains_behind_a_prefix():
    assert_attention(attention_case([200], 150, 6, 2, 64, torch.bfloat16, chain=True), 1e-2)


@pytest.mark.parametrize("heads", [3, 8])
def test_commit(heads):
    lengths = [100, 0, 31]
    pages, table, starts = random_pages(lengths, 16, (heads, 64), torch.bfloat16, layers=12, room=40)
    staged = draw(12, 3, 40, heads, 64)
    path = torch.arange(40, device="cuda").repeat(3, 1)
    num_kept = torch.tensor([5, 40, 0], device="cuda")
    expected = pages.clone()
    commit_rows_naive(list(staged), list(expected), table, starts, path, num_kept)
    planes = CommitTable(12, 2, 16, pages.device)
    planes.fill(list(staged), list(pages))
    commit_rows(planes, table, starts, path, num_kept)
    assert torch.equal(pages.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("vocab", [17, 8193, 49152, 151936])
def test_picks(vocab):
    scores = draw(2, 9, vocab)
    assert torch.equal(pick_tiles(scores).picks.view(2, 9), picks_naive(scores))
    probs = scores.float().softmax(-1)
    variates = torch.empty(16, 2, vocab, device="cuda").exponential_()
    noise = NoiseRing(variates, torch.tensor([3, 40], device="cuda"))
    depths = torch.arange(9, device="cuda").repeat(2, 1)
    assert torch.equal(pick_tiles(probs, noise, depths).picks.view(2, 9), picks_naive(probs, noise, depths))


@pytest.mark.parametrize("width", [1, 8, 64])
def test_walks(width):
    window = random_window([5] * 16, width, 3, vocab=1000)
    # Scores that favour the tokens of the window, so that paths of all lengths occur.
    scores = draw(16, width, 5000, dtype=torch.float32)
    scores.scatter_add_(
        2, window.tokens[:, None].expand(-1, width, -1).contiguous(), torch.full((16, width, width), 4.0).cuda()
    )
    tiles = pick_tiles(scores)
    limits = torch.full((16,), 50, device="cuda")
    stops = window.tokens[3, :1]
    found = walk(tiles, window.tokens, window.parents, window.ancestor_bits, window.num_nodes, limits, stops)
    expected = walk_naive(tiles.picks.view(16, width), window.tokens, window.parents, window.num_nodes, limits, stops)
    for name in ("picks", "path", "num_kept", "next_tokens", "stopped"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert width == 1 or len(set(found.num_kept.tolist())) > 1


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 32, 100])
@pytest.mark.parametrize(
    ("hidden", "inner", "heads", "kv_heads", "half"), [(576, 1536, 9, 3, 32), (1024, 2816, 8, 2, 64)]
)
def test_skinny_products(rows, pdl, hidden, inner, heads, kv_heads, half):
    x, norm = draw(rows, hidden) * 3, draw(hidden, seed=1)
    stream, exact = stream_naive(x, norm), stream_naive(x.double(), norm.double())
    weights = tuple(draw(h * 2 * half, hidden, seed=i) * 0.05 for i, h in enumerate((heads, kv_heads, kv_heads)))
    angles = torch.arange(64.0, device="cuda")[:, None] * torch.linspace(1, 0.01, half, device="cuda")
    rotation = Rotation(angles.cos().bfloat16(), angles.sin().bfloat16())
    positions = torch.arange(rows, device="cuda") % 64
    gate_weight, up = (draw(inner, hidden, seed=seed) * 0.05 for seed in (6, 7))
    down, act = draw(hidden, inner, seed=8) * 0.05, draw(rows, inner, seed=9)

    def double(*tensors):
        return tuple(tensor.double() for tensor in tensors)

    exact_rotation = Rotation(*double(rotation.cos, rotation.sin))
    references = project_heads_naive(exact, 1e-5, double(*weights), None, exact_rotation, positions)
    for found, expected in zip(
        project_heads(stream, 1e-5, weights, None, rotation, positions, pdl=pdl), references, strict=True
    ):
        assert relative_error(found, expected) < 1e-2
    found = gate(stream, 1e-5, gate_weight, up, pdl=pdl)
    assert relative_error(found, gate_naive(exact, 1e-5, *double(gate_weight, up))) < 1e-2
    found = add_product(act, down, stream, norm, pdl=pdl)
    expected = add_product_naive(*double(act, down), exact, norm.double())
    assert relative_error(found.x, expected.x) < 1e-2
    assert relative_error(found.scaled, expected.scaled) < 1e-2
    assert relative_error(found.squares.sum(1), expected.squares.sum(1)) < 1e-2
    found = normed_product(stream, 1e-5, up, pdl=pdl)
    assert relative_error(found, normed_product_naive(exact, 1e-5, up.double())) < 1e-2
