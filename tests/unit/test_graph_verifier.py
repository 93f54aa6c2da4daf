"""Capture logic of `GraphVerifier`, with a backend that records without a GPU."""

import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.sampling import Sampler
from specdec.types import Draft, Window
from specdec.verify.capture import CaptureBackend, CudaGraphBackend, Recording, bucket
from specdec.verify.eager import EagerVerifier
from specdec.verify.graph import GraphVerifier
from specdec.verify.vectorized import NEEDS_PREFIX
from tests.windows import random_case, stops_at, temperature


class RecordingBackend(CaptureBackend):
    """Replays by running the function again into the first replay's buffer, as a CUDA graph would.

    Like a CUDA graph, a recording computes nothing by itself: the buffer holds rubbish until the first replay.
    """

    def __init__(self, failures: int = 0, reason: str | None = None) -> None:
        self.captures = 0
        self.replays = 0
        self.attempts = 0
        self.failures = failures
        self.reason = reason

    def unavailable(self, device: torch.device) -> str | None:
        return self.reason

    def capture(self, function: Callable[[], Tensor]) -> Recording:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        first = function()
        self.captures += 1
        output = torch.full_like(first, -77)

        def replay() -> Tensor:
            self.replays += 1
            return output.copy_(function())

        return Recording(first, replay)


def window_of(width: int, num_rows: int = 1, vocab: int = 9) -> tuple[Tensor, Window, Sampler]:
    draft = Draft.chains([[1] * (width - 1)] * num_rows)
    rows = tuple(range(num_rows))
    window = Window.over(torch.zeros(num_rows, dtype=torch.long), draft, rows, (0,) * num_rows)
    logits = torch.randn(num_rows, width, vocab, generator=torch.Generator().manual_seed(width))
    return logits, window, Sampler(torch.zeros(num_rows, 1, dtype=torch.long))


VARIANTS = {
    "greedy": {},
    "sampled": {"sampled": True, "history": 3},
    "processed": {"sampled": True, "processors": [temperature(0.6)], "scores_only": True},
    "stops": {"criteria": [stops_at(3, 5)]},
    "lockstep": {"lockstep": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@given(seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=5, deadline=None)
def test_equal_noise_gives_the_eager_verdict_over_many_calls_of_one_verifier(variant, seed, data):
    """Shapes differ and come again, so that padding, stale buffers, captures and replays all take part."""
    backend = RecordingBackend()
    verifier = GraphVerifier(backend)
    for i in range(6):
        num_rows, num_drafts = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([0, 2, 3, 6, 7, 12]))
        options = {"agreement": data.draw(st.sampled_from([0.0, 0.8, 1.0])), **VARIANTS[variant]}
        case = random_case(seed + i, num_rows, num_drafts, chain=data.draw(st.booleans()), **options)
        expected = case.run(EagerVerifier())
        assert case.run(verifier) == expected
        assert case.run(verifier) == expected, "the replay of the same window"
    assert verifier.counters.replays == backend.replays >= 6
    assert verifier.counters.captures == backend.captures
    assert verifier.counters.hits + verifier.counters.misses == 12
    assert not verifier.counters.uncaptured and not verifier.counters.failures


def test_widest_batch():
    case = random_case(1, 64, 63, agreement=0.97)
    verifier = GraphVerifier(RecordingBackend())
    for _ in range(2):
        assert case.run(verifier) == case.run(EagerVerifier())


def test_the_first_result_is_used_without_a_replay_and_later_ones_are_replays():
    backend = RecordingBackend()
    verifier = GraphVerifier(backend)
    logits, window, sampler = window_of(4)
    verifier.verify(logits, window, sampler)
    assert (backend.captures, backend.replays) == (1, 0)
    verifier.verify(logits, window, sampler)
    assert (backend.captures, backend.replays) == (1, 1)


def test_a_verdict_is_not_overwritten_by_the_next_replay():
    verifier = GraphVerifier(RecordingBackend())
    one, two = random_case(1, 3, 7, agreement=1.0), random_case(2, 3, 7, agreement=0.0)
    verifier.verify(one.logits, one.window, one.make_sampler())
    verdict = verifier.verify(one.logits, one.window, one.make_sampler())
    before = verdict.num_kept.tolist(), verdict.path.tolist(), verdict.next_tokens.tolist()
    verifier.verify(two.logits, two.window, two.make_sampler())
    assert (verdict.num_kept.tolist(), verdict.path.tolist(), verdict.next_tokens.tolist()) == before
    assert max(verdict.num_kept.tolist()) > 1


def test_lengths_are_no_part_of_the_key():
    backend = RecordingBackend()
    verifier = GraphVerifier(backend)
    logits, window, sampler = window_of(7, num_rows=2)
    for lengths in ([6, 6], [0, 3], [2, 6]):
        draft = Draft(window.tokens[:, 1:], window.parents[:, 1:], torch.tensor(lengths))
        verifier.verify(logits, Window.over(window.tokens[:, 0], draft, (0, 1), (lengths[0], 7)), sampler)
    assert backend.captures == 1


def test_widths_and_batches_share_their_buckets():
    backend = RecordingBackend()
    verifier = GraphVerifier(backend)
    for num_rows, width in ((3, 5), (4, 8), (3, 7), (4, 6)):
        verifier.verify(*window_of(width, num_rows))
    assert backend.captures == 1
    verifier.verify(*window_of(9, 3))
    assert backend.captures == 2
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 33)] == [1, 2, 4, 4, 8, 64]


def test_the_key_needs_no_device_read(monkeypatch):
    """On the meta device any host read raises, and the walk runs there."""
    logits, window, _ = window_of(5, 2)
    to = {"device": "meta"}
    draft = Draft(window.tokens[:, 1:].to(**to), window.parents[:, 1:].to(**to), window.num_nodes.to(**to) - 1)
    meta = Window(
        window.rows,
        window.tokens.to(**to),
        window.parents.to(**to),
        window.depths.to(**to),
        draft.lengths + 1,
        (0, 0),
        is_chain=True,
    )
    decision = GraphVerifier(RecordingBackend())._decide(logits.to(**to), None, meta)
    assert decision.shape == (2, 11)


def test_the_least_recently_used_recording_goes_first():
    backend = RecordingBackend()
    verifier = GraphVerifier(backend, capacity=2)
    for width in (1, 4, 1, 8, 1, 4):
        verifier.verify(*window_of(width))
    counters = verifier.counters
    assert (counters.captures, counters.evictions, counters.hits, counters.misses) == (4, 2, 2, 4)


def test_default_capacity_is_32():
    verifier = GraphVerifier(RecordingBackend())
    for vocab in range(10, 43):
        verifier.verify(*window_of(1, vocab=vocab))
    assert (verifier.counters.captures, verifier.counters.evictions) == (33, 1)


def test_a_failing_key_is_tried_three_times_and_others_go_on(caplog):
    backend = RecordingBackend(failures=3)
    verifier = GraphVerifier(backend)
    case = random_case(4, 2, 3, agreement=0.9)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            assert case.run(verifier) == case.run(EagerVerifier())
    assert backend.attempts == 3
    assert verifier.counters.failures == {"RuntimeError: operation not permitted when stream is capturing": 3}
    assert verifier.counters.uncaptured == {"capture failed": 3, "capture failed 3 times for this shape": 3}
    assert len(caplog.records) == 3
    verifier.verify(*window_of(12))
    assert backend.captures == 1, "one failing key is no global switch"


def test_a_key_that_fails_once_is_captured_at_the_next_call():
    backend = RecordingBackend(failures=1)
    verifier = GraphVerifier(backend)
    for _ in range(3):
        verifier.verify(*window_of(4))
    assert (backend.attempts, backend.captures, backend.replays) == (2, 1, 1)


def test_where_nothing_can_be_captured_the_reason_is_logged_once_and_counted(caplog):
    verifier = GraphVerifier(CudaGraphBackend())
    case = random_case(4, 2, 5, agreement=0.9)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert case.run(verifier) == case.run(EagerVerifier())
    [reason] = verifier.counters.uncaptured
    assert "cpu" in reason and verifier.counters.uncaptured[reason] == 3
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_a_reason_may_pass():
    backend = RecordingBackend(reason="the current stream is being captured already")
    verifier = GraphVerifier(backend)
    verifier.verify(*window_of(4))
    backend.reason = None
    verifier.verify(*window_of(4))
    assert backend.captures == 1


def test_inputs_that_are_too_large_for_static_buffers_run_uncaptured():
    backend = RecordingBackend()
    verifier = GraphVerifier(backend, max_input_bytes=1000)
    verifier.verify(*window_of(64))
    assert backend.attempts == 0
    assert verifier.counters.uncaptured == {"the inputs are larger than 1000 bytes": 1}


def test_processors_that_need_the_text_go_the_eager_way():
    def no_repeats(ids, scores):
        return scores.scatter(1, ids, -torch.inf)

    case = random_case(5, 4, 8, processors=[no_repeats])
    verifier = GraphVerifier(RecordingBackend())
    assert case.run(verifier) == case.run(EagerVerifier())
    assert verifier.delegations == {NEEDS_PREFIX: 1} and verifier.counters.misses == 0


def test_verification_shows_in_a_profile():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        GraphVerifier(RecordingBackend()).verify(*window_of(4))
    names = {event.key for event in profile.key_averages()}
    assert {"specdec.verify", "specdec.verify.decide"} <= names
