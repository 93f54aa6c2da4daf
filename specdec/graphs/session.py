"""The device's state of a batch, and what the host knows of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import ConfigError
from specdec.graphs.drafts import DeviceDrafter
from specdec.graphs.mailbox import Mailbox
from specdec.graphs.step import Law, StepProgram, law_key
from specdec.kernels.step_state import StepBuffers
from specdec.kv.pages import PagedKVCache
from specdec.sampling import Noise, Processor
from specdec.target import Target

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


def batch_bucket(rows: int) -> int:
    """Rows that steps of so many rows are recorded for.  Raises `ConfigError` beyond the largest."""
    for bucket in BATCH_BUCKETS:
        if rows <= bucket:
            return bucket
    raise ConfigError(f"a batch of {rows} rows; accepted for recorded steps: at most {BATCH_BUCKETS[-1]}")


@final
class Session:
    """Buffers for one batch bucket, and the programs that work on them.

    The buffers outlive a generation, so that its recordings serve the next one.
    """

    def __init__(
        self, target: Target, drafter: DeviceDrafter, cache: PagedKVCache, rows: int, max_pages: int, run_ahead: int
    ) -> None:
        self.rows = rows
        self.max_pages = max_pages
        self.buffers = StepBuffers.empty(rows, drafter.width, target.device)
        self.mailbox = Mailbox(self.buffers.record, run_ahead + 1)
        self._target = target
        self._drafter = drafter
        self._cache = cache
        self._page_table = torch.zeros(rows, max_pages, dtype=torch.int32, device=target.device)
        self._programs: dict[Hashable, StepProgram] = {}
        self._ring: Float[Tensor, "capacity b v"] | None = None
        self._filled = 0

    def load(self, roots: Sequence[int]) -> None:
        """Start a batch: cache rows `0 .. len(roots) - 1` as they stand, all paused; the other rows are done."""
        count = len(roots)
        for buffer in (self.buffers.limits, self.buffers.counts, self.buffers.lengths, self.buffers.roots):
            buffer.zero_()
        self.buffers.roots[:count] = torch.tensor(roots, device=self.buffers.roots.device)
        lengths = [self._cache.length(row) for row in range(count)]
        self.buffers.lengths[:count] = torch.tensor(lengths, dtype=torch.int32, device=self.buffers.lengths.device)
        self._filled = 0

    def arm(self, row: int, num_tokens: int) -> None:
        """Let a paused row emit so many tokens, for which it has pages."""
        pages = self._cache.pages_of(row)
        if len(pages) > self.max_pages:
            raise ConfigError(f"row {row} holds {len(pages)} pages; accepted: at most {self.max_pages} of this session")
        table = torch.tensor(pages, dtype=torch.int32, device=self._page_table.device)
        self._page_table[row, : len(pages)] = table
        self.buffers.limits[row] = num_tokens

    def halt(self, row: int) -> None:
        """Let a row be done: steps that are on their way already still advance it."""
        self.buffers.limits[row] = 0

    def key(self, processors: tuple[Processor, ...], sampled: bool, stop_tokens: tuple[int, ...]) -> Hashable:
        """What tells recordings apart; the session is part of it, since its buffers' addresses are recorded."""
        return (id(self), law_key(processors), sampled, stop_tokens)

    def program(
        self, key: Hashable, processors: tuple[Processor, ...], sampled: bool, stop_tokens: tuple[int, ...]
    ) -> StepProgram:
        """The program of a key, made where it is not there (any more)."""
        if key not in self._programs:
            stops = torch.tensor(stop_tokens, dtype=torch.long, device=self._page_table.device)
            law = Law(processors, self._ring if sampled else None, stops)
            self._programs[key] = StepProgram(
                self._target, self._drafter, self._cache, self.buffers, self._page_table, law
            )
        return self._programs[key]

    def has_noise(self, first: int, last: int) -> bool:
        """Whether the noise ring is large enough for the generated indices from `first` to `last` at once."""
        return self._ring is not None and last - first < len(self._ring)

    def make_noise_ring(self, capacity: int, vocab_size: int) -> None:
        """Make room for the noise of `capacity` indices; recordings that read the old ring are stale."""
        self._ring = torch.ones(capacity, self.rows, vocab_size, device=self._page_table.device)
        self._filled = 0

    def forget_programs(self) -> None:
        """What programs refer to has moved."""
        self._programs.clear()

    def fill_noise(self, noise: Noise, first: int, last: int) -> None:
        """Put the noise of the indices from `first` to `last` in place, where it is not yet."""
        assert self._ring is not None
        for index in range(max(first, self._filled), last + 1):
            variates: Int[Tensor, "B v"] = noise.at(index)
            self._ring[index % len(self._ring), : len(variates)] = variates
        self._filled = max(self._filled, last + 1)
