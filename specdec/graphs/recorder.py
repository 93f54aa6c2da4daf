"""Recordings of steps by key, least recently used out first; what cannot be recorded runs as it is, and says why."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import final

import torch

from specdec.graphs.step import StepProgram
from specdec.verify.capture import CaptureBackend, CudaGraphBackend, first_line

logger = logging.getLogger(__name__)


@dataclass
class RecorderCounters:
    """What a `StepRecorder` did, since it was made."""

    recordings: int = 0
    replays: int = 0
    evictions: int = 0
    pool_bytes: int = 0
    """Device memory that recordings took from the driver; they share one pool, which keeps it."""
    failures: dict[Hashable, str] = field(default_factory=dict)
    """Why a key could not be recorded."""


@final
class StepRecorder:
    """Runs step programs through recordings; one that failed is not tried again."""

    def __init__(self, backend: CaptureBackend | None = None, capacity: int = 32) -> None:
        """Args:
        backend: None takes CUDA graphs.
        capacity: most recordings kept.
        """
        self.counters = RecorderCounters()
        self._backend = backend or CudaGraphBackend()
        self._capacity = capacity
        self._replays: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replays)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._replays

    def run(self, key: Hashable, program: StepProgram) -> str | None:
        """Run one step of the program, recorded under `key` if it can be; returns why it is not, or None."""
        if key in self._replays:
            self._replays.move_to_end(key)
            self._replays[key]()
            self.counters.replays += 1
            return None
        reason = self.counters.failures.get(key) or self._backend.unavailable(program.buffers.tokens.device)
        if reason is not None:
            program.run()
            return reason
        return self._record(key, program)

    def latest(self) -> Callable[[], object]:
        """The replay that ran last, for measuring it alone.  Raises `KeyError` where nothing is recorded."""
        return self._replays[next(reversed(self._replays), None)]

    def clear(self) -> None:
        """Let go of all recordings."""
        self._replays.clear()

    def _record(self, key: Hashable, program: StepProgram) -> str | None:
        """Run the step, and record it while at it: the backend runs a function once before it records it."""
        steps_run = 0

        def step() -> torch.Tensor:
            nonlocal steps_run
            program.run()
            steps_run += 1
            return program.buffers.record

        before = _reserved_bytes(program.buffers.tokens.device)
        try:
            recording = self._backend.capture(step)
        except RuntimeError as error:
            if steps_run == 0:
                # Not the recording failed but the step itself.
                raise
            reason = first_line(error)
            self.counters.failures[key] = reason
            logger.warning("recording of %s failed: %s", key, reason)
            return reason
        program.stage.finish_recording()
        self.counters.recordings += 1
        self.counters.pool_bytes += _reserved_bytes(program.buffers.tokens.device) - before
        self._replays[key] = recording.replay
        if len(self._replays) > self._capacity:
            self._replays.popitem(last=False)
            self.counters.evictions += 1
        return None


def _reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
