"""Named ranges for profilers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def profiling_range(name: str, device: torch.device) -> Iterator[None]:
    """Mark what happens inside as `name`: an NVTX range on CUDA, a `torch.profiler` record elsewhere."""
    if device.type == "cuda":
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
    else:
        with torch.profiler.record_function(name):
            yield
