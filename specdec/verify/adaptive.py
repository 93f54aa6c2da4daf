"""Equal verifiers, and for each shape whichever of them has been fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.sampling import Sampler
from specdec.types import Verdict, Window
from specdec.verify.base import Verifier
from specdec.verify.capture import bucket
from specdec.verify.eager import EagerVerifier
from specdec.verify.graph import GraphVerifier
from specdec.verify.vectorized import VectorizedVerifier

TRIALS = 4
"""Timed calls of each verifier before one is chosen; the first does not count, it may capture."""
CALLS_BETWEEN_TRIALS = 1024


@dataclass
class _Race:
    seconds: dict[str, list[float]]
    calls: int = 0
    chosen: str | None = None
    waiting: list[str] = field(default_factory=list)


@final
class AdaptiveVerifier(Verifier):
    """Times equal verifiers against each other, per batch and window bucket, and takes the fastest from then on.

    All give the same verdict, so trying them changes nothing but the time; while it tries, it synchronises before the
    clock starts.
    """

    def __init__(
        self, verifiers: Mapping[str, Verifier] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Args:
        verifiers: by name; None takes the eager, vectorized and graph ones.
        """
        defaults = {"eager": EagerVerifier(), "vectorized": VectorizedVerifier(), "graph": GraphVerifier()}
        self._verifiers = dict(verifiers or defaults)
        self._clock = clock
        self._races: dict[Hashable, _Race] = {}

    def chosen(self, num_rows: int, width: int, scores_only: bool = True) -> str | None:
        """Which verifier a shape goes to; None while they are still being tried."""
        race = self._races.get((bucket(num_rows), bucket(width), scores_only))
        return None if race is None else race.chosen

    def verify(self, logits: Float[Tensor, "b w v"], window: Window, sampler: Sampler) -> Verdict:
        key = (bucket(len(window.rows)), bucket(window.width), sampler.scores_only)
        race = self._races.setdefault(key, _Race({}))
        if race.calls % CALLS_BETWEEN_TRIALS == 0:
            race.seconds = {name: [] for name in self._verifiers}
            race.waiting = list(self._verifiers) * TRIALS
        race.calls += 1
        if not race.waiting and race.chosen is not None:
            return self._verifiers[race.chosen].verify(logits, window, sampler)
        name = race.waiting.pop(0)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        start = self._clock()
        verdict = self._verifiers[name].verify(logits, window, sampler)
        race.seconds[name].append(self._clock() - start)
        if not race.waiting:
            race.chosen = min(self._verifiers, key=lambda name: median(race.seconds[name][1:]))
        return verdict
