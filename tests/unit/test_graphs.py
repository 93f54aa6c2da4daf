"""Whole steps on the device: the program against plain decoding, the recorder's plans, run-ahead, pauses and failures.

Without a GPU nothing is recorded: programs run as they are, over kernels in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from tests.kernel_cases import DEVICE
from tests.models import tiny_llama

pytest.importorskip("triton")

from specdec.attention.fused import attend_fused
from specdec.attention.reference import attend
from specdec.decoder import SpeculativeDecoder
from specdec.errors import ConfigError, NonFiniteLogits
from specdec.graphs.decoder import GraphConfig, GraphDecoder
from specdec.graphs.drafts import SyntheticDrafts
from specdec.graphs.recorder import StepRecorder
from specdec.graphs.session import batch_bucket
from specdec.hf.attention import ATTENTION
from specdec.hf.target import HFTarget
from specdec.sampling import GeneratorNoise, Sampler
from specdec.verify.capture import CaptureBackend, Recording

PROMPTS = [[5, 9, 11, 3, 7, 20, 31], [0, 0, 8, 8, 2, 40, 41]]


class ReplayByRunning(CaptureBackend):
    """Stands in for CUDA graphs: a replay runs the function again."""

    def __init__(self, fail: Callable[[int], bool] = lambda i: False) -> None:
        self.captures = 0
        self._fail = fail

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def capture(self, function: Callable[[], Tensor]) -> Recording:
        self.captures += 1
        first = function()
        if self._fail(self.captures):
            raise RuntimeError("operation not permitted when stream is capturing")
        return Recording(first, function)


@pytest.fixture(scope="module")
def model():
    return tiny_llama().to(DEVICE)


def make_inputs(rows=2):
    ids = torch.tensor(PROMPTS[:rows], device=DEVICE)
    return ids, (ids != 0).long()


def attend_without_kernel(query, view, window, rules):
    """What the fused kernel computes, in torch: the interpreter takes seconds for what these tests do not look at."""
    lengths = tuple(view.prefix.lengths.tolist())
    layout = dataclasses.replace(view.prefix, host_lengths=lengths)
    return attend(query, dataclasses.replace(view, prefix=layout), window, rules)


@pytest.fixture(autouse=True)
def torch_attention(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setitem(ATTENTION, "fused", attend_without_kernel)


def make_decoder(model, drafter=None, backend=None, **options):
    recorder = StepRecorder(backend or ReplayByRunning(), options.pop("capacity", 32))
    target = HFTarget(model, "fused")
    return GraphDecoder(target, HFTarget(model, "paged"), drafter, GraphConfig.of(**options), recorder)


def make_sampler(model, ids, seed=None, processors=(), **options):
    """A sampler as `GraphDecoder` wants it if `ids` lie on the host; noise is drawn where the model is."""
    noise = None
    if seed is not None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        noise = GeneratorNoise(generator.get_state(), len(ids), model.config.vocab_size, torch.device(DEVICE))
    return Sampler(ids, processors, noise=noise, scores_only=True, **options)


def plain_text(model, ids, mask, new_tokens, **options):
    sampler = make_sampler(model, ids, **options)
    decoder = SpeculativeDecoder(HFTarget(model))
    list(decoder.stream(ids, mask, sampler=sampler, max_length=ids.shape[1] + new_tokens))
    return sampler.emitted


def decode(decoder, model, ids, mask, new_tokens, stop_tokens=(), **options):
    sampler = make_sampler(model, ids.cpu(), **options)
    records = list(
        decoder.stream(ids, mask, sampler=sampler, max_length=ids.shape[1] + new_tokens, stop_tokens=stop_tokens)
    )
    return sampler.emitted, records


def synthetic(texts, model, width, spoil_every=3):
    drafts = torch.tensor(texts, device=DEVICE)
    spoiled = (torch.arange(drafts.shape[1], device=DEVICE) % spoil_every == spoil_every - 1).expand_as(drafts)
    return SyntheticDrafts(drafts, spoiled, width, model.config.vocab_size)


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_plain_steps_equal_plain_decoding(model, run_ahead):
    ids, mask = make_inputs()
    expected = plain_text(model, ids, mask, 9)
    decoder = make_decoder(model, run_ahead=run_ahead)
    for _ in range(2):
        found, records = decode(decoder, model, ids, mask, 9)
        assert found == expected
        assert [record.rows for record in records] == [(0, 1)] * 9
    counters = decoder.recorder.counters
    assert counters.recordings == 1, "the second generation must use the first one's recording"
    assert counters.replays >= 16 - 2
    assert decoder._cache.allocator.num_free == decoder._cache.allocator.num_pages


def test_drafted_steps_equal_plain_decoding_and_accept(model):
    ids, mask = make_inputs()
    expected = plain_text(model, ids, mask, 14)
    decoder = make_decoder(model, synthetic(expected, model, width=4))
    found, records = decode(decoder, model, ids, mask, 14)
    assert found == expected
    kept = [len(tokens) for record in records for tokens in record.emitted]
    assert max(kept) >= 3 and min(kept) < max(kept)
    for record in records:
        assert record.commit.rows_committed == sum(map(len, record.emitted))
        assert record.commit.bytes_written == record.commit.rows_committed * decoder._cache.bytes_per_token
        for drafted, nodes, tokens in zip(record.draft_tokens, record.accepted_nodes, record.emitted, strict=True):
            assert [drafted[node - 1] for node in nodes] == tokens[:-1]


def test_steps_over_the_attention_kernel(model, monkeypatch):
    monkeypatch.setitem(ATTENTION, "fused", attend_fused)
    ids, mask = make_inputs(1)
    expected = plain_text(model, ids, mask, 5)
    assert decode(make_decoder(model, synthetic(expected, model, 3)), model, ids, mask, 5)[0] == expected


@pytest.mark.parametrize("width", [1, 4])
def test_one_seed_gives_one_text(model, width):
    ids, mask = make_inputs()
    processors = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopKLogitsWarper(20)])
    expected = plain_text(model, ids, mask, 12, seed=7, processors=processors)
    other = plain_text(model, ids, mask, 12, seed=8, processors=processors)
    assert expected != other
    drafter = synthetic(expected, model, width) if width > 1 else None
    found, _ = decode(make_decoder(model, drafter), model, ids, mask, 12, seed=7, processors=processors)
    assert found == expected


def test_stop_tokens_pause_the_device_and_the_host_decides(model):
    ids, mask = make_inputs()
    expected = plain_text(model, ids, mask, 10)
    stop = expected[0][4]
    decoder = make_decoder(model, synthetic(expected, model, 4, spoil_every=100))
    # The host has no criterion for it: the row must go on as if nothing had been.
    found, _ = decode(decoder, model, ids, mask, 10, stop_tokens=(stop,))
    assert found == expected
    ended, _ = decode(
        decoder, model, ids, mask, 10, stop_tokens=(stop,), criteria=[lambda seen, _: seen[:, -1] == stop]
    )
    for row, text in zip(ended, expected, strict=True):
        assert row == (text[: text.index(stop) + 1] if stop in text else text)
    # Nor does the device need to know of the stop.
    assert decode(decoder, model, ids, mask, 10, criteria=[lambda seen, _: seen[:, -1] == stop])[0] == ended


def test_rows_that_run_out_of_reserved_pages_are_armed_again(model):
    ids, mask = make_inputs()
    expected = plain_text(model, ids, mask, 13)
    decoder = make_decoder(model, synthetic(expected, model, 3), reserve=4, page_size=4)
    found, _ = decode(decoder, model, ids, mask, 13)
    assert found == expected


def test_a_growing_cache_makes_recordings_stale(model):
    ids, mask = make_inputs(1)
    backend = ReplayByRunning()
    decoder = make_decoder(model, backend=backend, page_size=1, reserve=2)
    assert decode(decoder, model, ids, mask, 4)[0] == plain_text(model, ids, mask, 4)
    assert decode(decoder, model, ids, mask, 24)[0] == plain_text(model, ids, mask, 24)
    assert backend.captures > 1


def test_a_failed_recording_is_reported_and_the_step_stands(model):
    ids, mask = make_inputs()
    expected = plain_text(model, ids, mask, 6)
    backend = ReplayByRunning(fail=lambda i: True)
    decoder = make_decoder(model, backend=backend)
    found, records = decode(decoder, model, ids, mask, 6)
    assert found == expected
    assert backend.captures == 1, "what failed is not tried again"
    assert all("not permitted" in record.notes["uncaptured"] for record in records)
    assert next(iter(decoder.recorder.counters.failures.values())).startswith("RuntimeError")


def test_the_least_recently_used_recording_goes_first(model):
    ids, mask = make_inputs(1)
    backend = ReplayByRunning()
    decoder = make_decoder(model, backend=backend, capacity=2)
    for stop in (1, 2, 1, 3, 1, 2):
        decode(decoder, model, ids, mask, 3, stop_tokens=(stop,))
    assert backend.captures == 4 and decoder.recorder.counters.evictions == 2


def test_a_batch_that_shrinks_uses_its_bucket(model):
    assert [batch_bucket(n) for n in (1, 2, 3, 5, 8, 9, 128)] == [1, 2, 4, 8, 8, 16, 128]
    with pytest.raises(ConfigError, match="129 rows"):
        batch_bucket(129)
    ids = torch.tensor([PROMPTS[0]] * 3, device=DEVICE)
    expected = plain_text(model, ids, None, 5)
    assert decode(make_decoder(model), model, ids, None, 5)[0] == expected


def test_nan_is_raised_and_the_pages_come_back(model):
    ids, mask = make_inputs()
    decoder = make_decoder(model)
    weight = model.lm_head.weight
    saved = weight.detach().clone()
    with torch.no_grad():
        weight[3] = float("nan")
    try:
        with pytest.raises(NonFiniteLogits):
            decode(decoder, model, ids, mask, 5)
    finally:
        with torch.no_grad():
            weight.copy_(saved)
    assert decoder._cache.allocator.num_free == decoder._cache.allocator.num_pages
    assert decode(decoder, model, ids, mask, 5)[0] == plain_text(model, ids, mask, 5)


def test_requests_that_need_the_host_are_refused(model):
    ids, mask = make_inputs()
    decoder = make_decoder(model)
    for options, reason in ((dict(scores_only=False), "text"), (dict(lockstep=True), "batch")):
        sampler = Sampler(ids.cpu(), [lambda ids, scores: scores], **({"scores_only": True} | options))
        assert reason in decoder.refusal(sampler)
        with pytest.raises(ConfigError, match=reason):
            decoder.start(ids, mask, sampler=sampler, max_length=20)
    with pytest.raises(ConfigError, match="max_length=7"):
        decoder.start(ids, mask, sampler=make_sampler(model, ids.cpu()), max_length=7)
    with pytest.raises(ConfigError, match="run_ahead=65"):
        GraphConfig.of(run_ahead=65)


def test_two_runs_at_once_are_refused(model):
    ids, mask = make_inputs()
    decoder = make_decoder(model)
    with (
        decoder.start(ids, mask, sampler=make_sampler(model, ids.cpu()), max_length=12),
        pytest.raises(ConfigError, match="open"),
    ):
        decoder.start(ids, mask, sampler=make_sampler(model, ids.cpu()), max_length=12)
