"""Recorded steps on a GPU: really recorded, and equal to `model.generate` on the same device."""

from __future__ import annotations

import pytest
import torch

from tests.models import tiny_llama

pytest.importorskip("triton")

from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from specdec.graphs.decoder import GraphConfig, GraphDecoder
from specdec.graphs.drafts import SyntheticDrafts
from specdec.hf.fused import fused_target
from specdec.hf.target import HFTarget
from specdec.sampling import GeneratorNoise, Sampler

NEW = 40


@pytest.fixture(scope="module")
def model():
    return tiny_llama(hidden_size=128, head_dim=32, num_hidden_layers=3, intermediate_size=256).to("cuda")


def inputs(rows):
    generator = torch.Generator().manual_seed(4)
    return torch.randint(2, 101, (rows, 30), generator=generator).cuda()


def hf_text(model, ids, **options):
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=0, **options)
    return output[:, ids.shape[1] :].tolist()


def decode(decoder, model, ids, noise=None, processors=()):
    sampler = Sampler(ids.cpu(), processors, noise=noise, scores_only=True)
    records = list(decoder.stream(ids, sampler=sampler, max_length=ids.shape[1] + NEW))
    assert all("uncaptured" not in record.notes for record in records), records[0].notes
    return sampler.emitted, records


def make_decoder(model, fused, drafter=None, run_ahead=2):
    target = fused_target(model) if fused else HFTarget(model, "fused")
    return GraphDecoder(target, HFTarget(model), drafter, GraphConfig(run_ahead=run_ahead))


def synthetic(texts, width):
    drafts = torch.tensor(texts, device="cuda")
    spoiled = (torch.arange(drafts.shape[1], device="cuda") % 5 == 4).expand_as(drafts)
    return SyntheticDrafts(drafts, spoiled, width, 101)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_text_equals_generate(model, fused, rows):
    ids = inputs(rows)
    expected = hf_text(model, ids, do_sample=False)
    decoder = make_decoder(model, fused)
    assert decode(decoder, model, ids)[0] == expected
    assert decode(decoder, model, ids)[0] == expected
    counters = decoder.recorder.counters
    assert counters.recordings == 1 and not counters.failures
    assert counters.replays >= 2 * NEW - 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("run_ahead", [0, 3])
def test_drafted_text_equals_generate(model, fused, run_ahead):
    ids = inputs(3)
    expected = hf_text(model, ids, do_sample=False)
    decoder = make_decoder(model, fused, synthetic(expected, 8), run_ahead)
    found, records = decode(decoder, model, ids)
    assert found == expected
    assert len(records) < NEW / 2


@pytest.mark.parametrize("width", [1, 8])
def test_one_seed_gives_the_text_of_generate(model, width):
    ids = inputs(3)
    torch.manual_seed(11)
    expected = hf_text(model, ids, do_sample=True, temperature=1.2, top_k=30)
    torch.manual_seed(11)
    noise = GeneratorNoise(torch.cuda.get_rng_state(), 3, 101, torch.device("cuda"))
    processors = LogitsProcessorList([TemperatureLogitsWarper(1.2), TopKLogitsWarper(30)])
    drafter = synthetic(expected, width) if width > 1 else None
    found, _ = decode(make_decoder(model, False, drafter), model, ids, noise, processors)
    assert found == expected


def test_bf16_logits_of_the_fused_target_are_as_near_as_the_models_own():
    model = tiny_llama(hidden_size=128, head_dim=32, num_hidden_layers=3, initializer_range=0.05).to("cuda")
    exact = model.double()
    ids = inputs(1)[:, :8]
    reference = exact(ids).logits
    half = model.to(torch.bfloat16)
    own = half(ids).logits
    from specdec.kv.deferred import DeferredWriter
    from specdec.kv.pages import PagedKVCache
    from specdec.types import Window

    target = fused_target(half)
    cache = PagedKVCache(target.layers, 8)
    cache.add_row()
    writer = DeferredWriter(cache)
    window = Window.chain(ids.tolist(), (0,), (0,), target.device)
    writer.begin(window)
    fused = target.forward(window, writer).logits
    own_error = float((own.double() - reference).norm() / reference.norm())
    fused_error = float((fused.double() - reference).norm() / reference.norm())
    assert fused_error < 1.5 * own_error + 1e-3, (fused_error, own_error)
