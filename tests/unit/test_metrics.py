"""What is counted, when, and how it is told."""

from __future__ import annotations

import builtins

import pytest
import torch

from specdec import HFTarget, PagedKVCache, Sampler, SpeculativeDecoder, Verdict, Window
from specdec.errors import OutOfPages, UnsupportedError, WindowError
from specdec.kv.deferred import DeferredWriter
from specdec.kv.direct import DirectWriter
from specdec.kv.metrics import LEFT_OPEN, DeviceCounters, MeteredWriter, WriterMetrics, metered
from specdec.metrics import prometheus_text
from specdec.stats import SpecStats
from specdec.target import LayerShape
from specdec.types import Draft
from specdec.verify.graph import GraphVerifier
from specdec.verify.vectorized import NEEDS_PREFIX
from tests.models import VOCAB, tiny_llama
from tests.systems import DRAFTERS, continuation, prompts, speculative

CPU = torch.device("cpu")
SHAPE = LayerShape(1, 4, 4, torch.float32, CPU)
BYTES = 2 * 2 * 4 * 4
"""Of one token: two layers, K and V, four numbers of four bytes."""


def window(tokens: list[int], length: int = 0) -> Window:
    return Window.chain([tokens], (0,), (length,), CPU)


def verdict(*path: int) -> Verdict:
    kept = torch.tensor([len(path)])
    return Verdict(torch.tensor([path]), kept, torch.tensor([0]), torch.tensor([False]))


def stage_all(writer, width: int) -> None:
    for layer in range(2):
        rows = torch.full((1, width, 1, 4), float(layer))
        writer.stage(layer, rows, rows)


def open_writer(make=DeferredWriter, num_pages: int = 4) -> tuple[PagedKVCache, MeteredWriter]:
    cache = PagedKVCache((SHAPE, SHAPE), num_pages, 4)
    cache.add_row()
    return cache, MeteredWriter(make(cache))


@pytest.mark.parametrize(("make", "moved"), [(DeferredWriter, 2), (DirectWriter, 5)])
def test_a_window_is_counted_after_it_was_written(make, moved):
    _, writer = open_writer(make)
    writer.begin(window([1, 2, 3, 4, 5]))
    stage_all(writer, 5)
    assert writer.metrics == WriterMetrics(), "nothing before the commit"
    stats = writer.commit(verdict(0, 1))
    metrics = writer.metrics
    assert (metrics.windows, metrics.rows_staged, metrics.rows_committed, metrics.rows_rejected) == (1, 5, 2, 3)
    assert metrics.bytes_written == stats.bytes_written == moved * BYTES
    assert metrics.commit_paths == {stats.commit_path: 1} and not metrics.aborts


def test_a_commit_that_fails_is_not_counted():
    _, writer = open_writer()
    writer.begin(window([1, 2]))
    writer.stage(0, torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    try:
        writer.commit(verdict(0))
    except WindowError:
        writer.abort()
    assert writer.metrics == WriterMetrics(aborts={"WindowError": 1})


def test_aborts_by_reason():
    cache, writer = open_writer()
    writer.abort()
    assert not writer.metrics.aborts, "no window, no abort"
    writer.begin(window([1]))
    writer.abort()
    writer.abort()
    try:
        writer.begin(window([1]))
        raise ArithmeticError("a forward fails")
    except ArithmeticError:
        writer.abort()
    with pytest.raises(OutOfPages):
        writer.begin(window([0] * 99))
    writer.abort()
    assert writer.metrics.aborts == {LEFT_OPEN: 1, "ArithmeticError": 1}
    assert cache.length(0) == 0


def test_a_window_that_a_step_leaves_open_is_aborted_and_counted_when_the_run_ends():
    model, inputs, metrics = tiny_llama(), prompts(1, VOCAB), WriterMetrics()
    decoder = SpeculativeDecoder(HFTarget(model), writer=metered(DeferredWriter, metrics))
    with decoder.start(inputs["input_ids"], sampler=Sampler(inputs["input_ids"]), max_length=20) as run:
        length = run.cache.length(0)
        run.writer.begin(Window.over(torch.tensor([1]), Draft.empty(1), (0,), (length,)))
    assert metrics.aborts == {LEFT_OPEN: 1}


class Broken(Exception):
    pass


def test_a_failing_step_is_counted_by_the_kind_of_its_error(monkeypatch):
    model, inputs, metrics = tiny_llama(), prompts(1, VOCAB), WriterMetrics()
    target = HFTarget(model)
    decoder = SpeculativeDecoder(target, writer=metered(DeferredWriter, metrics))
    with decoder.start(inputs["input_ids"], sampler=Sampler(inputs["input_ids"]), max_length=20) as run:
        monkeypatch.setattr(model, "forward", lambda *_, **__: (_ for _ in ()).throw(Broken()))
        with pytest.raises(Broken):
            decoder.step(run)
    assert metrics.aborts == {"Broken": 1}


@pytest.mark.parametrize("writer", [DeferredWriter, DirectWriter])
def test_sums_over_a_generation_are_those_of_its_records(writer):
    model, inputs, metrics, records = tiny_llama(), prompts(3, VOCAB), WriterMetrics(), []
    truth = continuation(model, inputs, max_new_tokens=24)
    drafter = DRAFTERS["late-wrong-tree"](truth, VOCAB)
    speculative(model, inputs, drafter, writer=metered(writer, metrics), on_step=records.append, max_new_tokens=24)
    stats = SpecStats.of(records)
    prompt_rows = int(inputs["attention_mask"].sum()) - 3
    per_token = HFTarget(model).profile.bytes_per_token
    assert metrics.rows_staged == stats.rows_staged + prompt_rows
    assert metrics.rows_committed == stats.rows_committed + prompt_rows
    assert metrics.rows_rejected == stats.rows_rejected == stats.rows_staged - stats.emitted
    assert metrics.bytes_written == stats.bytes_written + prompt_rows * per_token
    if writer is DeferredWriter:
        assert metrics.bytes_written == metrics.rows_committed * per_token, "exactly once each"


def test_device_counters_equal_the_host_counters():
    _, writer = open_writer()
    device = DeviceCounters("cpu")
    for length, nodes, path in ((0, 5, (0, 1)), (2, 1, (0,)), (3, 3, (0, 1, 2))):
        staged = window([1] * nodes, length)
        writer.begin(staged)
        stage_all(writer, nodes)
        kept = verdict(*path)
        writer.commit(kept)
        device.add(staged.num_nodes, kept.num_kept)
    on_device, on_host = device.read(BYTES), writer.metrics
    for name in ("windows", "rows_staged", "rows_committed", "rows_rejected", "bytes_written"):
        assert getattr(on_device, name) == getattr(on_host, name)


def test_fallbacks_are_counted_by_reason():
    model, inputs, records = tiny_llama(), prompts(2, VOCAB), []
    options = dict(max_new_tokens=8, on_step=records.append)
    speculative(model, inputs, "suffix", verifier="graph", **options)
    uncaptured = len(records)
    speculative(model, inputs, "suffix", verifier="vectorized", repetition_penalty=1.2, **options)
    stats = SpecStats.of(records)
    assert stats.fallbacks == {
        "uncaptured: the tensors are on cpu; CUDA graphs need cuda": uncaptured,
        f"delegated: {NEEDS_PREFIX}": len(records) - uncaptured,
    }
    twice = SpecStats.of(records)
    twice.merge(stats)
    assert twice.fallbacks == {reason: 2 * count for reason, count in stats.fallbacks.items()}
    assert stats.to_dict()["fallbacks"] == stats.fallbacks


def test_prometheus_text():
    parser = pytest.importorskip("prometheus_client.parser")
    model, inputs, metrics, records = tiny_llama(), prompts(2, VOCAB), WriterMetrics(aborts={"OutOfPages": 2}), []
    verifier = GraphVerifier()
    options = dict(writer=metered(DeferredWriter, metrics), on_step=records.append, max_new_tokens=8)
    speculative(model, inputs, "suffix", verifier=verifier, **options)
    stats = SpecStats.of(records)
    text = prometheus_text(stats, metrics, verifier.counters)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["specdec_emitted_tokens_total",] == stats.emitted
    assert samples["specdec_step_rows_total", "rejected"] == stats.rows_rejected
    assert samples["specdec_window_rows_total", "committed"] == metrics.rows_committed
    assert samples["specdec_page_bytes_total",] == metrics.bytes_written
    assert samples["specdec_aborts_total", "OutOfPages"] == 2
    assert sum(value for key, value in samples.items() if key[0] == "specdec_windows_total") == metrics.windows
    assert samples["specdec_graph_events_total", "hits"] == 0
    reason = "the tensors are on cpu; CUDA graphs need cuda"
    assert samples["specdec_graph_uncaptured_total", reason] == len(records)
    assert samples["specdec_fallbacks_total", f"uncaptured: {reason}"] == len(records)
    assert "specdec_aborts_total" not in prometheus_text(stats), "only what is given is told"


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match="specdec-torch"):
        prometheus_text(SpecStats())
