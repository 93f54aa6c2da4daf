"""Medians of per-prompt ratios, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.bench.measure import Measurement
from specdec.errors import ConfigError
from specdec.stats import SpecStats

Rate = Callable[[Measurement], float | None]
"""What is compared: `Measurement.tokens_per_second` or the like."""


@dataclass(frozen=True)
class Interval:
    """A median and how far it can be trusted."""

    median: float
    low: float
    high: float
    count: int
    """Figures that the median is over."""


def median_interval(
    values: Sequence[float], seed: int = 0, resamples: int = 2000, confidence: float = 0.95
) -> Interval | None:
    """The median with a percentile bootstrap interval, the same for the same seed; None for no values.

    (Efron 1979; the prompts are what is drawn again.)
    """
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"confidence={confidence}; accepted: between 0 and 1")
    if not values:
        return None
    figures = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(figures), size=(resamples, len(figures)))
    medians = np.median(figures[draws], axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(np.median(figures)), float(low), float(high), len(figures))


@dataclass(frozen=True)
class Group:
    """All measurements of some category, by system."""

    name: str
    by_system: dict[str, list[Measurement]]

    def ratio(self, system: str, base: str, rate: Rate, seed: int = 0) -> Interval | None:
        """Median over turns of the system's rate over the base's, turns without a rate left out."""
        return median_interval(self.ratios(system, base, rate), seed)

    def ratios(self, system: str, base: str, rate: Rate) -> list[float]:
        """One ratio for each turn that both systems have a rate for."""
        pairs = zip(self.by_system[system], self.by_system[base], strict=True)
        rates = [(rate(ours), rate(theirs)) for ours, theirs in pairs]
        return [ours / theirs for ours, theirs in rates if ours is not None and theirs is not None]

    def tokens_per_second(self, system: str) -> float:
        """All tokens over all time, prefill included."""
        runs = [run for measurement in self.by_system[system] for run in measurement.runs]
        return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)

    def decode_tokens_per_second(self, system: str) -> float | None:
        """All tokens behind the first emissions over the time that they took."""
        runs = [run for measurement in self.by_system[system] for run in measurement.runs]
        seconds = sum(run.decode_seconds for run in runs)
        return sum(run.decode_tokens for run in runs) / seconds if seconds > 0.0 else None

    def stats(self, system: str) -> SpecStats | None:
        """Sums over all steps; None for systems without."""
        found = [measurement.stats for measurement in self.by_system[system] if measurement.stats is not None]
        if not found:
            return None
        total = SpecStats()
        for stats in found:
            total.merge(stats)
        return total

    def identical(self, system: str) -> tuple[int, int]:
        """Turns with the reference's tokens, and all turns."""
        turns = self.by_system[system]
        return sum(turn.divergence is None for turn in turns), len(turns)


OVERALL = "overall"


def group_by_category(measurements: Sequence[Measurement]) -> list[Group]:
    """One group for all measurements, then one for each category in the order of the questions."""
    categories = list(dict.fromkeys(measurement.category for measurement in measurements))
    groups = [_group(OVERALL, measurements)]
    return groups + [_group(name, [m for m in measurements if m.category == name]) for name in categories]


def _group(name: str, measurements: Sequence[Measurement]) -> Group:
    by_system: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_system.setdefault(measurement.system, []).append(measurement)
    return Group(name, by_system)


@dataclass(frozen=True)
class StepCost:
    """What a step costs against one of plain decoding, and the speed-up that follows (times in ms)."""

    plain: float
    """One whole step of plain decoding."""
    draft: float
    """Drafting, and learning from the verdict."""
    verify: float
    """Target forward and walk."""
    rest: float
    """Committing, and whatever else the step's own clock saw."""
    tau: float

    @staticmethod
    def of(stats: SpecStats, plain: SpecStats) -> StepCost:
        """Costs of a system's steps beside those of plain decoding."""
        draft, verify = stats.phase_ms("draft", "observe"), stats.phase_ms("target", "verify")
        return StepCost(plain.step_ms, draft, verify, stats.step_ms - draft - verify, stats.tau)

    @property
    def expected_speedup(self) -> float:
        """τ·T_plain / (T_draft + T_verify + rest): what the tokens/s of decoding should show."""
        return self.tau * self.plain / (self.draft + self.verify + self.rest)
