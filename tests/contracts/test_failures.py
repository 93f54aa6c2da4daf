"""Invariants 5 and 6: whatever fails, and wherever, nothing is lost and no page leaks."""

from __future__ import annotations

import hashlib
from typing import final

import pytest
import torch

import specdec
from specdec import HFTarget, Sampler, SpeculativeDecoder, Verifier
from specdec.draft.base import Drafter
from specdec.errors import ConfigError, NonFiniteLogits, OutOfPages
from specdec.types import Draft
from specdec.verify.eager import EagerVerifier
from tests.models import VOCAB, tiny_llama
from tests.systems import DRAFTERS, WRITERS, Recorder, continuation, plain, prompts, speculative


class Boom(Exception):
    """What the tests throw."""


class Fuse:
    """Counts down at the chosen point and throws once."""

    def __init__(self, point: str, after: int) -> None:
        self.point, self.after = point, after

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.after -= 1
            if self.after == 0:
                raise Boom(point)


@final
class FusedDrafter(Drafter):
    def __init__(self, inner: Drafter, fuse: Fuse) -> None:
        self.inner, self.fuse = inner, fuse

    taps = ()

    def begin(self, prompts, max_length):
        self.fuse("begin")
        self.inner.begin(prompts, max_length)

    def fork(self, source, copies):
        self.inner.fork(source, copies)

    def propose(self, context):
        self.fuse("propose")
        return self.inner.propose(context)

    def observe(self, window, features, verdict):
        self.fuse("observe")
        self.inner.observe(window, features, verdict)

    def end(self):
        self.inner.end()


@final
class FusedVerifier(Verifier):
    def __init__(self, fuse: Fuse) -> None:
        self.fuse, self.inner = fuse, EagerVerifier()

    def verify(self, logits, window, sampler):
        self.fuse("verify")
        verdict = self.inner.verify(logits, window, sampler)
        self.fuse("after verify")
        return verdict


class FusedWriter:
    """A writer factory whose writers throw."""

    def __init__(self, name: str, fuse: Fuse) -> None:
        self.name, self.fuse = name, fuse

    def __call__(self, cache):
        from specdec import KVWriter

        inner, fuse = WRITERS[self.name](cache), self.fuse

        @final
        class Writer(KVWriter):
            def begin(self, window):
                fuse("begin window")
                inner.begin(window)
                fuse("after begin window")

            def stage(self, layer, k, v):
                if layer == 1:
                    fuse("stage")
                return inner.stage(layer, k, v)

            def commit(self, verdict):
                fuse("commit")
                return inner.commit(verdict)

            def abort(self):
                inner.abort()

        return Writer()


POINTS = ["propose", "begin window", "after begin window", "stage", "verify", "after verify", "observe", "commit"]


def state(run) -> tuple:
    """All that a failed step must leave alone: lengths, committed rows, tokens, free pages, the sampler's history."""
    rows = range(run.cache.num_rows)
    content = hashlib.sha256()
    for row in rows:
        for layer in range(len(run.cache.layers)):
            for part in run.cache.read(layer, row):
                content.update(part.numpy().tobytes())
    lengths = [run.cache.length(row) for row in rows]
    return lengths, content.hexdigest(), [list(t) for t in run.tokens], [list(t) for t in run.sampler.emitted]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("point", POINTS)
def test_a_failed_step_leaves_everything_as_it_was_and_can_be_repeated(point, writer):
    model, inputs = tiny_llama(), prompts(3, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=20)
    prefill = {"begin window": 1, "after begin window": 1, "stage": 1, "observe": 1, "commit": 1}
    fuse = Fuse(point, 3 + prefill.get(point, 0))
    drafter = FusedDrafter(DRAFTERS["late-wrong-tree"](truth, VOCAB), fuse)
    decoder = SpeculativeDecoder(HFTarget(model), drafter, FusedWriter(writer, fuse), FusedVerifier(fuse))
    before_setting = model.config._attn_implementation
    sampler = Sampler(inputs["input_ids"])
    with decoder.start(**inputs, sampler=sampler, max_length=29) as run:
        decoder.step(run)
        decoder.step(run)
        before = state(run)
        with pytest.raises(Boom, match=point):
            decoder.step(run)
        assert state(run) == before
        assert model.config._attn_implementation == before_setting
        run.cache.check()
        while sampler.active_rows:
            decoder.step(run)
        cache = run.cache
    assert sampler.emitted == truth
    assert cache.allocator.num_free == cache.allocator.num_pages


@pytest.mark.parametrize("point", ["begin", *POINTS])
@pytest.mark.parametrize("occasion", [1, 2, 3])
def test_a_failed_generate_gives_all_pages_back_and_the_next_one_works(point, occasion):
    model, inputs = tiny_llama(), prompts(3, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=20)
    fuse = Fuse(point, 1 if point == "begin" else occasion)
    recorder = Recorder()
    fused = FusedWriter("deferred", fuse)

    def make_writer(cache):
        recorder.caches.append(cache)
        return fused(cache)

    drafter = FusedDrafter(DRAFTERS["mixed-tree"](truth, VOCAB), fuse)
    setting = model.config._attn_implementation
    with pytest.raises(Boom):
        speculative(model, inputs, drafter, writer=make_writer, verifier=FusedVerifier(fuse), max_new_tokens=20)
    for cache in recorder.caches:
        assert cache.allocator.num_free == cache.allocator.num_pages
    assert model.config._attn_implementation == setting
    assert plain(model, inputs, max_new_tokens=20)[:, 9:].tolist() == truth
    again = speculative(model, inputs, drafter, writer=make_writer, verifier=FusedVerifier(fuse), max_new_tokens=20)
    assert again[:, 9:].tolist() == truth


@pytest.mark.parametrize("kind", ["processor", "criterion", "streamer", "on_step"])
def test_a_failing_part_of_the_callers_leaves_nothing_behind(kind):
    from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    model, inputs = tiny_llama(), prompts(1, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=20)
    fuse = Fuse("part", 5)

    class Processor(LogitsProcessor):
        def __call__(self, input_ids, scores):
            fuse("part")
            return scores

    class Criterion(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            fuse("part")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    class Streamer(BaseStreamer):
        def put(self, value):
            fuse("part")

        def end(self):
            pass

    parts = {
        "processor": {"logits_processor": LogitsProcessorList([Processor()])},
        "criterion": {"stopping_criteria": StoppingCriteriaList([Criterion()])},
        "streamer": {"streamer": Streamer()},
        "on_step": {"on_step": lambda record: fuse("part")},
    }
    recorder = Recorder()
    drafter = DRAFTERS["mixed-tree"](truth, VOCAB)
    with pytest.raises(Boom):
        speculative(model, inputs, drafter, writer=recorder, max_new_tokens=20, **parts[kind])
    [cache] = recorder.caches
    assert cache.allocator.num_free == cache.allocator.num_pages
    assert model.config._attn_implementation == "sdpa"
    assert speculative(model, inputs, drafter, max_new_tokens=20, **parts[kind])[:, 9:].tolist() == truth


def test_nan_logits_are_an_error_not_a_token():
    model, inputs = tiny_llama(), prompts(2, VOCAB)
    model.lm_head.weight[3] = float("nan")
    recorder = Recorder()
    for options in ({"do_sample": False}, {"do_sample": True}):
        with pytest.raises(NonFiniteLogits):
            speculative(model, inputs, "suffix", writer=recorder, max_new_tokens=5, **options)
    assert all(cache.allocator.num_free == cache.allocator.num_pages for cache in recorder.caches)


def test_a_cache_that_is_too_small_says_how_many_tokens_fit():
    from specdec import SpecConfig

    model, inputs = tiny_llama(), prompts(1, VOCAB, length=30)
    recorder = Recorder()
    with pytest.raises(OutOfPages, match=r"16 tokens fit|0 tokens fit"):
        speculative(model, inputs, "none", writer=recorder, max_new_tokens=40, spec_config=SpecConfig(num_pages=3))
    [cache] = recorder.caches
    assert cache.allocator.num_free == 3


def test_a_long_generation_lets_the_cache_grow(monkeypatch):
    import specdec.decoder

    monkeypatch.setattr(specdec.decoder, "LARGEST_FIRST_RESERVATION", 1)
    model, inputs = tiny_llama(), prompts(3, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=150)
    recorder = Recorder()
    output = speculative(model, inputs, DRAFTERS["right"](truth, VOCAB), writer=recorder, max_new_tokens=150)
    assert output[:, 9:].tolist() == truth
    [cache] = recorder.caches
    assert cache.allocator.num_pages > 3 * -(-(9 + 1 + 64) // 16)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft.chains([[5, -1]]), "token -1"),
        (Draft.chains([[5, VOCAB]]), f"token {VOCAB}"),
        (Draft.trees([[(5, 0), (5, 0)]]), "stands twice"),
        (Draft.trees([[(5, 0), (6, 2)]]), "parent 2"),
        (Draft.chains([[5], [6]]), "2 rows"),
        (Draft.chains([list(range(10, 74))]), "at most 63"),
    ],
)
def test_a_drafter_that_breaks_its_contract_is_named_before_the_model_runs(draft, message):
    @final
    class Bad(Drafter):
        taps = ()

        def begin(self, prompts, max_length):
            pass

        def fork(self, source, copies):
            pass

        def propose(self, context):
            return draft

        def observe(self, window, features, verdict):
            pass

        def end(self):
            pass

    model, inputs = tiny_llama(), prompts(1, VOCAB)
    with pytest.raises(ConfigError, match=message):
        speculative(model, inputs, Bad(), max_new_tokens=80)
    assert specdec.generate(model, **inputs, max_new_tokens=3, pad_token_id=0).shape[1] == 12
