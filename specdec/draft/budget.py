"""How many nodes to draft: controllers that learn from what became of earlier drafts, and from what steps cost.

A controller decides once for the whole batch.  It sees nothing of the text; any choice is safe, a good one is fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from specdec.config import build_config, require_int, require_number
from specdec.errors import ConfigError
from specdec.types import MAX_WINDOW


@dataclass(frozen=True)
class Outcome:
    """What became of one step."""

    drafted: Sequence[int]
    """Nodes drafted for each row."""
    accepted: Sequence[Sequence[int]]
    """Ranks of the accepted nodes of each row: 1 is the node that was drafted first."""
    seconds: float
    """From the proposal to the end of verification."""


class BudgetController(ABC):
    """Chooses the most nodes to draft for each row of the next step."""

    @abstractmethod
    def choose(self, num_rows: int) -> int:
        """Nodes per row; 0 decodes plainly.  The step's `learn` follows, unless the step failed."""

    @abstractmethod
    def learn(self, outcome: Outcome) -> None:
        """Take up what became of the step chosen last."""


@dataclass(frozen=True)
class EwmaConfig:
    """How an `EwmaController` adjusts."""

    base: int = 5
    """Nodes at an acceptance of one half; never changed by what is learnt."""
    low: int = 1
    high: int = 16
    smoothing: float = 0.2
    """Weight of the newest step in the average (0 to 1)."""

    def __post_init__(self) -> None:
        require_int("low", self.low, 0, MAX_WINDOW - 1)
        require_int("high", self.high, self.low, MAX_WINDOW - 1)
        require_int("base", self.base, self.low, self.high)
        require_number("smoothing", self.smoothing, 0.0, 1.0)

    @staticmethod
    def of(**values: Any) -> EwmaConfig:
        """Build a configuration from keyword arguments, refusing unknown names by name."""
        return build_config(EwmaConfig, values)


@final
class EwmaController(BudgetController):
    """The simple rule, as a baseline: the budget follows a moving average of the acceptance, blind to what steps cost.

    `nodes = base · 2 · average`, within `low` and `high`.
    """

    def __init__(self, config: EwmaConfig | None = None) -> None:
        self.config = config or EwmaConfig()
        self.average = 0.5

    def choose(self, num_rows: int) -> int:
        wanted = round(self.config.base * 2 * self.average)
        return min(max(wanted, self.config.low), self.config.high)

    def learn(self, outcome: Outcome) -> None:
        drafted = sum(outcome.drafted)
        if drafted:
            share = sum(map(len, outcome.accepted)) / drafted
            self.average += self.config.smoothing * (share - self.average)


@dataclass(frozen=True)
class CostModelConfig:
    """How a `CostModelController` weighs and explores."""

    budgets: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MAX_WINDOW - 1)
    """Nodes to choose from, ascending from 0."""
    memory: float = 0.92
    """What is left of old evidence after each step (0 to 1); 0.92 forgets within some thirty steps."""
    hysteresis: float = 0.04
    """Tokens per second that a budget must promise above the running one before it takes over (a share)."""
    exploration: float = 0.015
    """Share of the time that may go into drafts that are not expected to pay."""

    def __post_init__(self) -> None:
        if len(self.budgets) < 2 or self.budgets[0] != 0 or list(self.budgets) != sorted(set(self.budgets)):
            raise ConfigError(f"budgets={self.budgets!r}; accepted: at least two, ascending from 0")
        require_int("budgets", self.budgets[-1], 1, MAX_WINDOW - 1)
        require_number("memory", self.memory, 0.0, 0.999)
        require_number("hysteresis", self.hysteresis, 0.0, 1.0)
        require_number("exploration", self.exploration, 0.001, 1.0)

    @staticmethod
    def of(**values: Any) -> CostModelConfig:
        """Build a configuration from keyword arguments, refusing unknown names by name."""
        return build_config(CostModelConfig, values)


SAMPLES = 9
"""Step times kept per budget; their median is the cost, so that single hiccups (and captures) do not count."""
STEPS_BETWEEN_CHECKS = 48
"""While drafts pay, every so many steps one goes to a neighbouring budget, or (one in four) to plain decoding."""
LONGEST_PROBE_INTERVAL = 64
DISAPPOINTING_STEPS = 8
FAINTEST = 1e-9
ENOUGH = 0.5
"""Weight of evidence from which on a rank's own figures are believed."""


@dataclass
class CostTable:
    """Measured seconds of a step by budget, for one bucket of batch sizes."""

    samples: dict[int, deque[float]] = field(default_factory=dict)
    inherited: dict[int, float] = field(default_factory=dict)
    """Costs of another batch size, until there are own ones."""

    def add(self, budget: int, seconds: float) -> None:
        """Take up one step."""
        self.samples.setdefault(budget, deque(maxlen=SAMPLES)).append(seconds)

    def measured(self) -> dict[int, float]:
        """The lower median of each budget's samples (of two, the smaller), by ascending budget."""
        own = {budget: sorted(times)[(len(times) - 1) // 2] for budget, times in self.samples.items()}
        return dict(sorted({**self.inherited, **own}.items()))

    def costs(self, budgets: Sequence[int]) -> list[float]:
        """Seconds of a step with each budget: measured, or on the line through the two nearest measured ones; no
        budget beyond the measured ones counts as cheaper than those."""
        known = self.measured()
        sizes, seconds = list(known), list(known.values())
        return [float(value) for value in np.interp(budgets, sizes, seconds) + self._beyond(budgets, sizes, seconds)]

    def _beyond(self, budgets: Sequence[int], sizes: list[int], seconds: list[float]) -> np.ndarray:
        """What the end of the line adds to budgets larger than any measured one."""
        if len(sizes) < 2:
            return np.zeros(len(budgets))
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        return slope * np.maximum(np.asarray(budgets) - sizes[-1], 0)


class RankAcceptance:
    """Probability, by rank in the draft, that a node is accepted; old evidence fades with every step.

    Drafters draft their best nodes first, so the first n ranks are what a budget of n would have drafted.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._tried = np.zeros(MAX_WINDOW - 1)
        self._hit = np.zeros(MAX_WINDOW - 1)
        self._idle_steps = 0
        self._recent: deque[Outcome] = deque(maxlen=DISAPPOINTING_STEPS)
        self._disappointment = 0.0

    def learn(self, outcome: Outcome) -> None:
        """Take up one step, also one that drafted nothing.

        Where step after step falls far short of what was expected, the text has changed: all but the last steps are
        forgotten (a cumulative sum test; Page 1954).
        """
        if not any(outcome.drafted):
            self._idle_steps += 1
            return
        expected = self.expected_tokens(max(outcome.drafted)) - 1
        found = sum(map(len, outcome.accepted)) / len(outcome.accepted)
        self._recent.append(outcome)
        self._add(outcome)
        if expected >= 1:
            self._disappointment = max(0.0, self._disappointment + 0.4 - found / expected)
        if self._disappointment > 0.38 * DISAPPOINTING_STEPS:
            self._disappointment = 0.0
            self._tried[:], self._hit[:] = 0.0, 0.0
            for recent in self._recent:
                self._add(recent)

    def _add(self, outcome: Outcome) -> None:
        left = self._memory ** (1 + self._idle_steps)
        self._idle_steps = 0
        # Evidence all but gone fades no further: what it says of the acceptance stays.
        fading = np.where(self._tried > FAINTEST, left, 1.0)
        self._tried *= fading
        self._hit *= fading
        share = 1 / len(outcome.drafted)
        for drafted, accepted in zip(outcome.drafted, outcome.accepted, strict=True):
            self._tried[:drafted] += share
            if accepted:
                self._hit[np.asarray(accepted) - 1] += share

    def expected_tokens(self, budget: int) -> float:
        """Tokens that a step with this budget is expected to emit, the one it always emits included."""
        return float(1 + self.probabilities()[:budget].sum())

    def probabilities(self) -> np.ndarray:
        """By rank from 1; ranks without evidence go on as those before them fell."""
        weight = self._tried * self._memory**self._idle_steps
        # The first rank is believed however old its evidence: only a probe may raise hopes.
        is_known = weight >= ENOUGH
        is_known[0] = self._tried[0] > 0
        known = len(is_known) if is_known.all() else int(is_known.argmin())
        shares = self._hit[:known] / self._tried[:known] if known else np.array([0.5])
        middle = len(shares) // 2
        start = shares[middle - 1] if middle else 1.0
        ratio = 0.0 if start <= 0 else min(1.0, (shares[-1] / start) ** (1 / (len(shares) - middle)))
        beyond = np.arange(1, MAX_WINDOW - len(shares))
        return np.concatenate([shares, shares[-1] * ratio**beyond])


@final
class CostModelController(BudgetController):
    """Takes the budget with the most expected tokens per second, plain decoding among the choices.

    Expected tokens come from the acceptance by rank, seconds from measured steps.  Where plain decoding is best, short
    probes keep looking whether drafts would pay by now, as rarely as `exploration` demands; a probe that succeeds is
    followed by another one at once.
    """

    def __init__(self, config: CostModelConfig | None = None) -> None:
        self.config = config or CostModelConfig()
        self.acceptance = RankAcceptance(self.config.memory)
        self.budget = self.config.budgets[len(self.config.budgets) // 2]
        """The running choice; single steps may try another."""
        self._tables: dict[int, CostTable] = {}
        self._table = CostTable()
        self._plan: list[int] = []
        self._asked = 0
        self._since_probe = 0
        self._since_check = 0
        self._checks = 0

    def choose(self, num_rows: int) -> int:
        self._table = self._table_for(num_rows)
        self._asked = self._next()
        return self._asked

    def learn(self, outcome: Outcome) -> None:
        drafted = max(outcome.drafted, default=0)
        # What was asked for is not always what was drafted: the cost belongs to the latter.
        self._table.add(self._nearest(drafted) if drafted else 0, outcome.seconds)
        self.acceptance.learn(outcome)
        if drafted:
            self._since_probe = 0
        if self.budget == 0 and any(outcome.accepted) and not self._plan:
            self._plan = [self._probe_budget]
        if drafted and len(self._table.measured()) > 1:
            self._reconsider()

    @property
    def _probe_budget(self) -> int:
        return self.config.budgets[1]

    def _next(self) -> int:
        self._since_probe += 1
        self._since_check += 1
        if not self._table.measured():
            # Costs first: the running choice, plain decoding and the largest budget, twice.
            self._plan = [0, self.config.budgets[-1], self.budget, 0, self._probe_budget]
            return self.budget
        if self._plan:
            return self._plan.pop(0)
        if self.budget == 0:
            return self._probe_budget if self._since_probe >= self._probe_interval() else 0
        if self._since_check >= STEPS_BETWEEN_CHECKS:
            self._since_check = 0
            self._checks += 1
            return 0 if self._checks % 4 == 0 else self._neighbour(1 if self._checks % 2 else -1)
        return self.budget

    def _probe_interval(self) -> int:
        plain, probe = self._table.costs((0, self._probe_budget))
        overhead = max(0.0, probe / plain - 1)
        return min(max(8, round(overhead / self.config.exploration)), LONGEST_PROBE_INTERVAL)

    def _reconsider(self) -> None:
        """Compare expected tokens per second, of one row, of all budgets."""
        tokens = np.concatenate([[1.0], 1 + self.acceptance.probabilities().cumsum()])[list(self.config.budgets)]
        rates = tokens / self._table.costs(self.config.budgets)
        best = int(rates.argmax())
        gain = rates[best] / rates[self.config.budgets.index(self.budget)] - 1
        # Drafts that do not pay are given up at once: plain decoding is never a risk.
        if gain > (0.0 if best == 0 else self.config.hysteresis):
            self.budget = self.config.budgets[best]

    def _neighbour(self, direction: int) -> int:
        place = self.config.budgets.index(self.budget) + direction
        return self.config.budgets[min(max(place, 0), len(self.config.budgets) - 1)]

    def _nearest(self, drafted: int) -> int:
        return min(self.config.budgets[1:], key=lambda budget: (abs(budget - drafted), budget))

    def _table_for(self, num_rows: int) -> CostTable:
        bucket = max(1, num_rows).bit_length()
        if bucket not in self._tables:
            known = [size for size, table in self._tables.items() if len(table.measured()) > 1]
            nearest = min(known, key=lambda size: abs(size - bucket), default=None)
            self._tables[bucket] = CostTable(inherited={} if nearest is None else self._tables[nearest].measured())
        return self._tables[bucket]
