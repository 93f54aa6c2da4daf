"""Counters as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specdec.errors import UnsupportedError
from specdec.kv.metrics import WriterMetrics
from specdec.stats import SpecStats
from specdec.verify.capture import CaptureCounters

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily


def prometheus_text(
    stats: SpecStats | None = None, writer: WriterMetrics | None = None, captures: CaptureCounters | None = None
) -> str:
    """What was counted so far, in the text format that Prometheus scrapes.

    Raises `UnsupportedError` where the package `prometheus_client` is missing.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise UnsupportedError(
            "Prometheus text needs the package prometheus_client; accepted: pip install 'specdec-torch[metrics]'"
        ) from error
    registry = CollectorRegistry()
    registry.register(_Families(stats, writer, captures))
    return generate_latest(registry).decode()


class _Families:
    """The collector that a registry asks."""

    def __init__(self, stats: SpecStats | None, writer: WriterMetrics | None, captures: CaptureCounters | None) -> None:
        self._stats, self._writer, self._captures = stats, writer, captures

    def collect(self) -> Iterator[CounterMetricFamily]:
        if self._stats is not None:
            yield from _of_steps(self._stats)
        if self._writer is not None:
            yield from _of_writer(self._writer)
        if self._captures is not None:
            yield from _of_captures(self._captures)


def _of_steps(stats: SpecStats) -> Iterator[CounterMetricFamily]:
    yield _counter("specdec_steps", "Target forwards, prefill not counted.", stats.rounds)
    yield _counter("specdec_drafted_tokens", "Drafted tokens.", stats.drafted)
    yield _counter("specdec_accepted_tokens", "Accepted drafts.", stats.accepted)
    yield _counter("specdec_emitted_tokens", "Emitted tokens.", stats.emitted)
    yield _counter("specdec_step_rows", "K/V rows of steps, in tokens.", _rows(stats), "fate")
    yield _counter("specdec_step_page_bytes", "Bytes of K/V that steps wrote to pages.", stats.bytes_written)
    yield _counter("specdec_fallbacks", "Steps in which a part took another way.", stats.fallbacks, "reason")


def _of_writer(writer: WriterMetrics) -> Iterator[CounterMetricFamily]:
    yield _counter(
        "specdec_windows", "Windows committed, by commit path, prefill included.", writer.commit_paths, "path"
    )
    yield _counter("specdec_window_rows", "K/V rows of windows, in tokens.", _rows(writer), "fate")
    yield _counter("specdec_page_bytes", "Bytes of K/V written to pages.", writer.bytes_written)
    yield _counter("specdec_aborts", "Windows aborted.", writer.aborts, "reason")


def _of_captures(captures: CaptureCounters) -> Iterator[CounterMetricFamily]:
    counts = {name: getattr(captures, name) for name in ("hits", "misses", "captures", "replays", "evictions")}
    yield _counter("specdec_graph_events", "What the graph cache did.", counts, "event")
    yield _counter("specdec_graph_failures", "Captures that failed.", captures.failures, "reason")
    yield _counter("specdec_graph_uncaptured", "Calls that ran without a graph.", captures.uncaptured, "reason")


def _rows(counts: Any) -> dict[str, int]:
    return {name: getattr(counts, f"rows_{name}") for name in ("staged", "committed", "rejected")}


def _counter(name: str, text: str, value: float | Mapping[str, int], label: str = "") -> CounterMetricFamily:
    from prometheus_client.core import CounterMetricFamily

    if not isinstance(value, Mapping):
        return CounterMetricFamily(name, text, value=value)
    family = CounterMetricFamily(name, text, labels=[label])
    for key, count in value.items():
        family.add_metric([key], count)
    return family
