"""What verification takes by itself: the verifiers on one window, without a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from specdec.policies import VERIFIERS
from specdec.sampling import Sampler
from specdec.types import Draft, Window
from specdec.verify.base import Verifier
from specdec.verify.capture import CaptureCache, CudaGraphBackend, Inputs
from specdec.verify.walk import decide


@dataclass(frozen=True)
class WindowCase:
    """A window of chains whose logits agree with half of the drafts."""

    logits: Tensor
    window: Window

    @staticmethod
    def of(rows: int, drafts: int, vocab: int, device: torch.device, dtype: torch.dtype) -> WindowCase:
        """Each row accepts another number of drafts, from none to all."""
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, vocab, (rows, drafts), generator=random)
        logits = torch.randn(rows, drafts + 1, vocab, generator=random).to(dtype)
        for row in range(rows):
            for node in range(row % (drafts + 1)):
                logits[row, node, tokens[row, node]] = 100.0
        parents = torch.arange(drafts).expand(rows, -1)
        lengths = torch.full((rows,), drafts)
        draft = Draft(tokens.to(device), parents.to(device), lengths.to(device))
        window = Window.over(torch.zeros(rows, dtype=torch.long, device=device), draft, tuple(range(rows)), (0,) * rows)
        return WindowCase(logits.to(device), window)


def verification_times(
    rows: int,
    drafts: int,
    vocab: int,
    device: torch.device,
    dtype: torch.dtype,
    names: Sequence[str] = ("off", "vectorized", "graph"),
    repeats: int = 200,
) -> list[dict[str, Any]]:
    """Microseconds of one greedy verification, by verifier: the call until the host knows the verdict, and on a GPU
    what the device spends on picks and walk."""
    case = WindowCase.of(rows, drafts, vocab, device, dtype)
    verifiers = {name: VERIFIERS[name]() for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeats + 5):
        for name, verifier in verifiers.items():
            seconds = host_seconds(verifier, case)
            if number >= 5:
                samples[name].append(seconds * 1e6)
    on_device = device_times(case) if device.type == "cuda" else {}
    return [
        {
            "verifier": name,
            "rows": rows,
            "drafts": drafts,
            "vocab": vocab,
            "host_us": median(samples[name]),
            "device_us": on_device.get(name),
        }
        for name in names
    ]


def host_seconds(verifier: Verifier, case: WindowCase) -> float:
    """One verification, from an idle device to the verdict on the host."""
    sampler = Sampler(torch.zeros(len(case.window.rows), 1, dtype=torch.long, device=case.logits.device))
    if case.logits.is_cuda:
        torch.cuda.synchronize(case.logits.device)
    start = time.perf_counter()
    verifier.verify(case.logits, case.window, sampler)
    return time.perf_counter() - start


def device_times(case: WindowCase, repeats: int = 500) -> dict[str, float]:
    """Microseconds per call of picks and walk, launched one by one and as a graph, by events around many calls."""
    window = case.window
    inputs: Inputs = (case.logits, window.tokens, window.parents, window.num_nodes)

    def function(given: Inputs) -> Tensor:
        logits, tokens, parents, num_nodes = given
        assert logits is not None and tokens is not None and parents is not None and num_nodes is not None
        return decide(logits, None, tokens, parents, num_nodes, window.is_chain)

    cache = CaptureCache(CudaGraphBackend())
    shapes = [tensor.shape for tensor in inputs if tensor is not None]
    calls = {"vectorized": lambda: function(inputs), "graph": lambda: cache.run("case", function, inputs, shapes)}
    return {name: event_microseconds(call, repeats) for name, call in calls.items()}


def event_microseconds(call: Any, repeats: int) -> float:
    """Mean microseconds between events around `repeats` calls."""
    for _ in range(5):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats
