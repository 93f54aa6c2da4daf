"""Capture and replay of a function over static inputs, kept by key, least recently used out first."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Captures of one key that may fail before the key is left alone."""

Inputs = Sequence[Tensor | None]
Function = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Recording:
    """What a backend makes of a function."""

    first_result: Tensor
    """What the function gave in the run before the recording; no replay is needed to have it."""
    replay: Callable[[], Tensor]
    """Run the recorded work again over the same inputs; the result is overwritten by the next replay."""


class CaptureBackend(ABC):
    """A way of recording device work once and replaying it."""

    @abstractmethod
    def unavailable(self, device: torch.device) -> str | None:
        """Why nothing can be captured on this device now; None where it can."""

    @abstractmethod
    def capture(self, function: Callable[[], Tensor]) -> Recording:
        """Run the function once, then record it.  Raises `RuntimeError` where it cannot be recorded."""


@final
class CudaGraphBackend(CaptureBackend):
    """CUDA graphs that share one memory pool; they must be replayed one after the other, on one stream."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._probed: dict[torch.device, str | None] = {}

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"the tensors are on {device.type}; CUDA graphs need cuda"
        if torch.cuda.is_current_stream_capturing():
            return "the current stream is being captured already"
        if device not in self._probed:
            self._probed[device] = self._probe(device)
        return self._probed[device]

    def capture(self, function: Callable[[], Tensor]) -> Recording:
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            first_result = function()
        current.wait_stream(side)
        first_result.record_stream(current)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: that must not invalidate this capture.
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = function()
        except BaseException:
            # A pool in which a recording broke off counts as being recorded to for ever.
            self._pool = None
            raise

        def replay() -> Tensor:
            graph.replay()
            return result

        return Recording(first_result, replay)

    def _probe(self, device: torch.device) -> str | None:
        """Capture a trivial function; drivers and debuggers may forbid that."""
        try:
            with torch.cuda.device(device):
                one = torch.ones(1, device=device)
                self.capture(lambda: one + 1)
        except RuntimeError as error:
            return f"a trial capture failed: {first_line(error)}"
        return None


@dataclass
class CaptureCounters:
    """What a `CaptureCache` did, since it was made."""

    hits: int = 0
    misses: int = 0
    captures: int = 0
    replays: int = 0
    evictions: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Failed captures by reason."""
    uncaptured: Counter[str] = field(default_factory=Counter)
    """Calls that ran without a graph, by reason."""


@dataclass
class _Entry:
    inputs: list[Tensor | None]
    recording: Recording


@final
class CaptureCache:
    """Runs functions through recordings kept by key; what cannot be captured runs as it is, and is counted.

    A key whose capture failed three times is left alone from then on; other keys are not affected.
    """

    def __init__(self, backend: CaptureBackend, capacity: int = 32, max_input_bytes: int = 64 << 20) -> None:
        """Args:
        capacity: most recordings; the least recently used one goes first.
        max_input_bytes: most bytes of static inputs of one recording; larger calls run uncaptured.
        """
        self.counters = CaptureCounters()
        self.why_uncaptured: str | None = None
        """Why the last call ran without a graph; None where it had one."""
        self._backend = backend
        self._capacity = capacity
        self._max_input_bytes = max_input_bytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._attempts: Counter[Hashable] = Counter()
        self._told: set[str] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def run(self, key: Hashable, function: Function, inputs: Inputs, shapes: Sequence[Sequence[int]]) -> Tensor:
        """The function's result over inputs padded to `shapes`, which follow from the key; it is overwritten by the
        next call.

        Padding is zero at first and whatever an earlier call left there later: the function must not depend on it.
        """
        reason = self.why_uncaptured = self._reason_against(key, inputs, shapes)
        if reason is not None:
            self.counters.uncaptured[reason] += 1
            self._tell_once(reason)
            return function(inputs)
        entry = self._entries.get(key)
        if entry is None:
            self.counters.misses += 1
            return self._captured(key, function, inputs, shapes)
        self.counters.hits += 1
        self.counters.replays += 1
        self._entries.move_to_end(key)
        fill(entry.inputs, inputs)
        return entry.recording.replay()

    def clear(self) -> None:
        """Let go of all recordings and what is known about failures."""
        self._entries.clear()
        self._attempts.clear()

    def _reason_against(self, key: Hashable, inputs: Inputs, shapes: Sequence[Sequence[int]]) -> str | None:
        given = [(tensor, shape) for tensor, shape in zip(inputs, shapes, strict=True) if tensor is not None]
        unavailable = self._backend.unavailable(given[0][0].device)
        if unavailable is not None:
            return unavailable
        if self._attempts[key] >= MAX_ATTEMPTS:
            return f"capture failed {MAX_ATTEMPTS} times for this shape"
        if sum(torch.Size(shape).numel() * tensor.element_size() for tensor, shape in given) > self._max_input_bytes:
            return f"the inputs are larger than {self._max_input_bytes} bytes"
        return None

    def _captured(self, key: Hashable, function: Function, inputs: Inputs, shapes: Sequence[Sequence[int]]) -> Tensor:
        static = [
            None if tensor is None else tensor.new_zeros(tuple(shape))
            for tensor, shape in zip(inputs, shapes, strict=True)
        ]
        fill(static, inputs)
        try:
            recording = self._backend.capture(lambda: function(static))
        except RuntimeError as error:
            reason = first_line(error)
            self._attempts[key] += 1
            self.counters.failures[reason] += 1
            self.counters.uncaptured["capture failed"] += 1
            self.why_uncaptured = "capture failed"
            logger.warning("capture %d of %s failed: %s", self._attempts[key], key, reason)
            return function(inputs)
        self.counters.captures += 1
        self._entries[key] = _Entry(static, recording)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
            self.counters.evictions += 1
        return recording.first_result

    def _tell_once(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.info("not captured: %s", reason)


def fill(static: Inputs, inputs: Inputs) -> None:
    """Copy inputs into the front corner of their static buffers, all tensors of one type in one call."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for buffer, tensor in zip(static, inputs, strict=True):
        if buffer is not None and tensor is not None:
            corners, sources = by_type.setdefault(tensor.dtype, ([], []))
            corners.append(buffer[tuple(slice(size) for size in tensor.shape)])
            sources.append(tensor)
    for corners, sources in by_type.values():
        torch._foreach_copy_(corners, sources)


def bucket(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def first_line(error: BaseException) -> str:
    """Kind and first line of an error, without what changes from run to run."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
