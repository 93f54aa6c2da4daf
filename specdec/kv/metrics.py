"""What writers did, counted after they did it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.kv.pages import PagedKVCache
from specdec.kv.writer import KVWriter
from specdec.types import CommitStats, KVView, Verdict, Window

LEFT_OPEN = "left open"
"""Reason of an abort that no exception caused."""


@dataclass
class WriterMetrics:
    """Sums over windows, prefill windows included; rows are tokens, not tokens × layers."""

    windows: int = 0
    """Windows committed."""
    rows_staged: int = 0
    rows_committed: int = 0
    bytes_written: int = 0
    commit_paths: Counter[str] = field(default_factory=Counter)
    """Windows by the way their rows went; see `CommitStats.commit_path`."""
    aborts: Counter[str] = field(default_factory=Counter)
    """Aborted windows by reason: the kind of exception, or `left open`."""

    @property
    def rows_rejected(self) -> int:
        """Staged rows of committed windows that were not kept."""
        return self.rows_staged - self.rows_committed

    def add(self, commit: CommitStats) -> None:
        """Account for one committed window."""
        self.windows += 1
        self.rows_staged += commit.rows_staged
        self.rows_committed += commit.rows_committed
        self.bytes_written += commit.bytes_written
        self.commit_paths[commit.commit_path] += 1


@final
class MeteredWriter(KVWriter):
    """Any writer, with its windows counted."""

    def __init__(self, writer: KVWriter, metrics: WriterMetrics | None = None) -> None:
        """Args:
        metrics: where to add to; None starts anew.
        """
        self.metrics = metrics or WriterMetrics()
        self._writer = writer
        self._is_open = False

    def begin(self, window: Window) -> None:
        self._writer.begin(window)
        self._is_open = True

    def stage(self, layer: int, k: Float[Tensor, "b w h dk"], v: Float[Tensor, "b w h dv"]) -> KVView:
        return self._writer.stage(layer, k, v)

    def commit(self, verdict: Verdict) -> CommitStats:
        commit = self._writer.commit(verdict)
        self._is_open = False
        self.metrics.add(commit)
        return commit

    def abort(self) -> None:
        self._writer.abort()
        if self._is_open:
            error = sys.exception()
            self.metrics.aborts[LEFT_OPEN if error is None else type(error).__name__] += 1
        self._is_open = False


def metered(
    make_writer: Callable[[PagedKVCache], KVWriter], metrics: WriterMetrics | None = None
) -> Callable[[PagedKVCache], KVWriter]:
    """A maker of writers that count, all into the same `metrics` where they are given."""
    return lambda cache: MeteredWriter(make_writer(cache), metrics)


@final
class DeviceCounters:
    """Windows, rows staged and rows committed, added up on the device: a recorded step counts on every replay."""

    def __init__(self, device: torch.device | str) -> None:
        self._sums = torch.zeros(3, dtype=torch.long, device=device)

    def add(self, num_nodes: Int[Tensor, " b"], num_kept: Int[Tensor, " b"]) -> None:
        """Account for one window; reads nothing on the host, and belongs behind the commit."""
        self._sums += torch.stack([torch.ones_like(num_nodes[0]), num_nodes.sum(), num_kept.sum()])

    def read(self, bytes_per_token: int) -> WriterMetrics:
        """The sums on the host; synchronises."""
        windows, staged, committed = self._sums.tolist()
        return WriterMetrics(windows, staged, committed, committed * bytes_per_token)
