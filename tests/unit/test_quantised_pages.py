"""Quantised pages: what is lost, what is stored, and that speculation over them is plain decoding over them."""

from __future__ import annotations

import pytest
import torch

import specdec
from specdec import DeferredWriter, DirectWriter, HFTarget, PagedKVCache, SpecConfig, Verdict, Window
from specdec.attention.fused import attend_fused
from specdec.attention.reference import AttentionRules
from specdec.errors import ConfigError, UnsupportedError, WindowError
from specdec.kv.codec import CODE_TYPES, ScaledPerLayer, ScaledPerToken
from specdec.target import LayerShape
from specdec.types import Draft
from tests.models import VOCAB, tiny_gemma2, tiny_llama, tiny_mistral
from tests.systems import DRAFTERS, GREEDY, SAMPLED, prompts, speculative

CPU = torch.device("cpu")
KINDS = tuple(CODE_TYPES)
WRITERS = {"deferred": DeferredWriter, "direct": DirectWriter}
LAYERS = (LayerShape(2, 8, 4, torch.float32, CPU), LayerShape(2, 8, 4, torch.float32, CPU))
WHOLE = ((0.02, 0.03), (0.01, 0.05))


def random_rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_relative_error(kind, dtype):
    rows = random_rows(2, 50, 4, 64, dtype=dtype)
    encoded = ScaledPerToken(CODE_TYPES[kind]).encode(rows)
    largest = rows.abs().amax(-1, keepdim=True)
    error = (encoded.rows.float() - rows.float()).abs() / largest.float()
    assert encoded.rows.dtype == dtype
    # half a step: 1/254 of the largest for int8, 1/28 for the three bits of mantissa; bf16 rounds once more
    assert float(error.max()) < (0.008 if kind == "int8" else 0.04)
    assert float(error.mean()) > 1e-4, "something must have been quantised"


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_rows(kind):
    rows = torch.zeros(1, 5, 1, 8)
    rows[0, 1] = 1e-42
    rows[0, 2] = torch.tensor([1e30, -1e30, 1, 0, 0, 0, 0, 0])
    rows[0, 3, 0, 0] = -7.0
    rows[0, 4] = 1e-20
    read = ScaledPerToken(CODE_TYPES[kind]).encode(rows).rows
    assert read.isfinite().all()
    assert (read[0, :2] == 0).all(), "zeros, and what is too small for any scale, are zeros"
    assert read[0, 2, 0, :2].tolist() == pytest.approx([1e30, -1e30], rel=0.01)
    assert read[0, 3, 0].tolist() == pytest.approx([-7.0] + [0.0] * 7, rel=0.01)
    assert read[0, 4, 0].tolist() == pytest.approx([1e-20] * 8, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_one_scale_per_layer_saturates(kind):
    codec = ScaledPerLayer(CODE_TYPES[kind], 0.5, CPU)
    top = CODE_TYPES[kind].largest * 0.5
    rows = torch.tensor([0.5, -4.0, 1e6, -1e6]).view(1, 1, 1, 4)
    assert codec.encode(rows).rows.flatten().tolist() == [0.5, -4.0, top, -top]


def stage_window(cache: PagedKVCache, writer, tokens: int, draft: Draft, seed: int):
    """A prefix of `tokens` tokens, then a window; returns it, its views and the rows that were staged."""
    row = cache.add_row()
    prefix = Window.chain([[0] * tokens], (row,), (0,), CPU)
    writer.begin(prefix)
    for layer in range(2):
        writer.stage(layer, random_rows(1, tokens, 2, 8, seed=layer), random_rows(1, tokens, 2, 4, seed=9 + layer))
    writer.commit(Verdict.keep_all(prefix, torch.tensor([0])))
    window = Window.over(torch.tensor([1]), draft, (row,), (tokens,))
    writer.begin(window)
    rows = [
        (
            random_rows(1, window.width, 2, 8, seed=seed + layer),
            random_rows(1, window.width, 2, 4, seed=seed + 10 + layer),
        )
        for layer in range(2)
    ]
    return window, [writer.stage(layer, *rows[layer]) for layer in range(2)], rows


@pytest.mark.parametrize("scales", [None, WHOLE])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_read_back_is_what_was_attended_to(writer, kind, scales):
    """Bit for bit: codes and scales of kept rows, and of no other, wherever they go."""
    cache = PagedKVCache(LAYERS, 8, 4, kv_dtype=kind, layer_scales=scales)
    tree = Draft.trees([[(5, 0), (6, 0), (7, 2), (8, 3)]])
    open_writer = WRITERS[writer](cache)
    _, views, rows = stage_window(cache, open_writer, 6, tree, seed=3)
    assert not torch.equal(views[0].k, rows[0][0])
    path = torch.tensor([[0, 2, 3]])
    verdict = Verdict(path, torch.tensor([3]), torch.tensor([9]), torch.tensor([False]))
    stats = open_writer.commit(verdict)
    for layer, view in enumerate(views):
        k, v = cache.read(layer, 0)
        assert torch.equal(k[6:], view.k[0, path[0]]) and torch.equal(v[6:], view.v[0, path[0]])
        assert torch.equal(k[:6], cache.encode(layer, random_rows(1, 6, 2, 8, seed=layer), rows[0][1])[0].rows[0])
    moved = 5 + 2 if writer == "direct" else 3
    assert stats.bytes_written == moved * cache.bytes_per_token


@pytest.mark.parametrize("kind", KINDS)
def test_memory(kind):
    shapes = [LayerShape(3, 64, 64, torch.bfloat16, CPU)] * 4
    plain = PagedKVCache(shapes, 2).bytes_per_token
    assert PagedKVCache(shapes, 2, kv_dtype=kind).bytes_per_token == plain * 66 / 128
    assert PagedKVCache(shapes, 2, kv_dtype=kind, layer_scales=[(1.0, 1.0)] * 4).bytes_per_token == plain / 2


@pytest.mark.parametrize("kind", KINDS)
def test_scales_move_with_their_rows_when_a_shared_tail_is_copied_and_when_pages_grow(kind):
    cache = PagedKVCache(LAYERS, 2, 4, growable=True, kv_dtype=kind)
    writer = DeferredWriter(cache)
    stage_window(cache, writer, 6, Draft.chains([[2]]), seed=1)
    writer.abort()
    before = [cache.read(layer, 0) for layer in range(2)]
    fork = cache.fork(0)
    cache.reserve((fork,), [20])
    for layer in range(2):
        for row in (0, fork):
            assert all(torch.equal(a, b) for a, b in zip(cache.read(layer, row), before[layer], strict=True))
    assert cache.pages_of(fork)[1] != cache.pages_of(0)[1]


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("drafter", "writer", "num_rows"),
    [("right", "deferred", 1), ("late-wrong-tree", "deferred", 3), ("late-wrong-tree", "direct", 3)],
)
def test_speculation_equals_plain_decoding_over_the_same_pages(drafter, writer, num_rows, kind, mode):
    model, inputs = tiny_llama(), prompts(num_rows, VOCAB)
    options = {**mode, "max_new_tokens": 18, "spec_config": SpecConfig(kv_dtype=kind)}
    expected = speculative(model, inputs, "none", **options).tolist()
    truth = [row[inputs["input_ids"].shape[1] :] for row in expected]
    records = []
    output = speculative(
        model, inputs, DRAFTERS[drafter](truth, VOCAB), writer=writer, on_step=records.append, **options
    )
    assert output.tolist() == expected
    assert sum(record.num_accepted for record in records) > 5


@pytest.mark.parametrize("make", [tiny_mistral, tiny_gemma2])
@pytest.mark.parametrize("attention", ["paged", "reference"])
def test_sliding_windows_and_soft_caps(make, attention):
    model, inputs = make(), prompts(2, VOCAB)
    options = {**GREEDY, "max_new_tokens": 16, "attention": attention, "spec_config": SpecConfig(kv_dtype="fp8_e4m3")}
    expected = speculative(model, inputs, "none", **options).tolist()
    truth = [row[inputs["input_ids"].shape[1] :] for row in expected]
    assert speculative(model, inputs, DRAFTERS["late-wrong-tree"](truth, VOCAB), **options).tolist() == expected


def test_scales_of_a_checkpoint():
    """One K and V scale per layer, here from the rows of a plain run."""
    model, inputs = tiny_llama(), prompts(2, VOCAB)
    decoder = specdec.SpeculativeDecoder(HFTarget(model), DRAFTERS["none"]([], VOCAB))
    with decoder.start(inputs["input_ids"], sampler=specdec.Sampler(inputs["input_ids"]), max_length=20) as run:
        decoder.step(run)
        rows = [run.cache.read(layer, 0) for layer in range(2)]
    scales = tuple((float(k.abs().max()) / 100, float(v.abs().max()) / 100) for k, v in rows)
    options = {**GREEDY, "max_new_tokens": 16, "spec_config": SpecConfig(kv_dtype="int8", kv_scales=scales)}
    expected = speculative(model, inputs, "none", **options).tolist()
    truth = [row[inputs["input_ids"].shape[1] :] for row in expected]
    assert speculative(model, inputs, DRAFTERS["late-wrong-tree"](truth, VOCAB), **options).tolist() == expected


def test_a_quantised_cache_changes_what_is_attended_to():
    model, inputs = tiny_llama(), prompts(1, VOCAB)
    texts = {
        kind: speculative(model, inputs, "none", max_new_tokens=30, spec_config=SpecConfig(kv_dtype=kind)).tolist()
        for kind in (None, "fp8_e4m3")
    }
    assert texts[None] != texts["fp8_e4m3"], "of a random model, whose text is easily turned"


def test_misuse():
    with pytest.raises(ConfigError, match="kv_dtype='fp4'; accepted: None, 'fp8_e4m3', 'int8'"):
        SpecConfig(kv_dtype="fp4")
    with pytest.raises(ConfigError, match="kv_dtype='fp4' is not known; accepted: fp8_e4m3, int8"):
        PagedKVCache(LAYERS, 2, kv_dtype="fp4")
    with pytest.raises(ConfigError, match="without kv_dtype"):
        PagedKVCache(LAYERS, 2, layer_scales=WHOLE)
    with pytest.raises(ConfigError, match="for 1 layers; accepted: 2"):
        PagedKVCache(LAYERS, 2, kv_dtype="int8", layer_scales=WHOLE[:1])
    with pytest.raises(ConfigError, match=r"layer 1 are .*; accepted: positive"):
        PagedKVCache(LAYERS, 2, kv_dtype="int8", layer_scales=(WHOLE[0], (0.0, 1.0)))
    cache = PagedKVCache(LAYERS, 4, 4, kv_dtype="int8", layer_scales=WHOLE)
    writer = DeferredWriter(cache)
    window, views, rows = stage_window(cache, writer, 3, Draft.chains([[2]]), seed=1)
    with pytest.raises(WindowError, match="twice"):
        writer.stage(1, *rows[1])
    with pytest.raises(UnsupportedError, match="one scale per layer"):
        attend_fused(torch.zeros(1, 2, 2, 8), views[0], window, AttentionRules(1.0))
