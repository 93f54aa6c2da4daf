"""Step records on their way from the device to the host, so that steps may run ahead of who reads them."""

from __future__ import annotations

from collections import deque
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor


@final
class Mailbox:
    """A ring of pinned host buffers: posting never waits, taking waits for the oldest record only."""

    def __init__(self, record: Int[Tensor, "b r"], capacity: int) -> None:
        on_gpu = record.is_cuda
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = [
            (
                torch.empty(record.shape, dtype=record.dtype, pin_memory=on_gpu),
                torch.cuda.Event() if on_gpu else None,
            )
            for _ in range(capacity)
        ]
        self._posted: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        return len(self._posted)

    @property
    def is_full(self) -> bool:
        """Whether the oldest record must be taken before another is posted."""
        return not self._free

    def post(self, record: Int[Tensor, "b r"]) -> None:
        """Copy a record once the device gets there; the next step may overwrite it at once."""
        slot, event = self._free.pop()
        slot.copy_(record, non_blocking=True)
        if event is not None:
            event.record()
        self._posted.append((slot, event))

    def take(self) -> list[list[int]]:
        """The oldest record; waits for the device to have written it."""
        slot, event = self._posted.popleft()
        if event is not None:
            event.synchronize()
        rows: list[list[int]] = slot.tolist()
        self._free.append((slot, event))
        return rows

    def drop_all(self) -> None:
        """Wait for what is posted, and forget it."""
        while self._posted:
            self.take()
