"""`SpecStats`: what a run of steps amounts to — acceptance, cost of each phase, rows and bytes written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specdec.types import StepRecord

FALLBACK_NOTES = ("uncaptured", "delegated")
"""Notes of a step that tell of a fallback."""

COUNTERS = (
    "rounds",
    "row_rounds",
    "drafted",
    "accepted",
    "emitted",
    "rows_staged",
    "rows_committed",
    "bytes_written",
)


@dataclass
class PhaseCost:
    """How often something ran, and how long it took in all (ms)."""

    count: int = 0
    total_ms: float = 0.0

    def add(self, milliseconds: float, count: int = 1) -> None:
        """Book one more run, or several."""
        self.count += count
        self.total_ms += milliseconds

    @property
    def mean_ms(self) -> float:
        """Mean time (ms); 0 for what never ran."""
        return self.total_ms / self.count if self.count else 0.0


@dataclass
class SpecStats:
    """Sums over `StepRecord`s, of one generation or of many.

    Always true, also where a stop cut a step short: `accepted + row_rounds == emitted`, since every row gets one token
    from each target forward whatever was drafted.
    """

    rounds: int = 0
    """Target forwards, prefill not counted."""
    row_rounds: int = 0
    """The same, each row of a batch counted by itself."""
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    rows_staged: int = 0
    rows_committed: int = 0
    bytes_written: int = 0
    tried_at: dict[int, int] = field(default_factory=dict)
    """Row-steps, by depth (1 is the first draft), in which all drafts before were accepted and one stood at that
    depth."""
    accepted_at: dict[int, int] = field(default_factory=dict)
    """Row-steps, by depth, in which a draft of that depth was accepted."""
    phases: dict[str, PhaseCost] = field(default_factory=dict)
    """Cost of each phase of a step: `draft`, `target`, `verify`, `observe`, `commit`."""
    target_by_width: dict[int, PhaseCost] = field(default_factory=dict)
    """Cost of target forward and verification, by nodes of the step's widest window."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Steps in which a part took another way than the one asked for, by reason; see `StepRecord.notes`."""

    @staticmethod
    def of(records: Iterable[StepRecord]) -> SpecStats:
        """The sums over some steps."""
        stats = SpecStats()
        for record in records:
            stats.add(record)
        return stats

    def add(self, record: StepRecord) -> None:
        """Account for one step."""
        self.rounds += 1
        self.row_rounds += len(record.rows)
        self.drafted += record.num_drafted
        self.accepted += record.num_accepted
        self.emitted += sum(map(len, record.emitted))
        self.rows_staged += record.commit.rows_staged
        self.rows_committed += record.commit.rows_committed
        self.bytes_written += record.commit.bytes_written
        for row in range(len(record.rows)):
            self._add_depths(record, row)
        for phase, milliseconds in record.timings_ms.items():
            self.phases.setdefault(phase, PhaseCost()).add(milliseconds)
        width = 1 + max(map(len, record.draft_tokens))
        cost = sum(record.timings_ms.get(phase, 0.0) for phase in ("target", "verify"))
        self.target_by_width.setdefault(width, PhaseCost()).add(cost)
        for kind in FALLBACK_NOTES:
            if kind in record.notes:
                reason = f"{kind}: {record.notes[kind]}"
                self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def merge(self, other: SpecStats) -> None:
        """Add the sums of another run to these."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.tried_at, other.tried_at), (self.accepted_at, other.accepted_at)):
            for depth, count in theirs.items():
                mine[depth] = mine.get(depth, 0) + count
        for reason, count in other.fallbacks.items():
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + count
        for phase, cost in other.phases.items():
            self.phases.setdefault(phase, PhaseCost()).add(cost.total_ms, cost.count)
        for width, cost in other.target_by_width.items():
            self.target_by_width.setdefault(width, PhaseCost()).add(cost.total_ms, cost.count)

    @property
    def tau(self) -> float:
        """Mean tokens that a row gains from one target forward, the one it always gains included; 0 before any step."""
        return self.emitted / self.row_rounds if self.row_rounds else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted share of the drafted tokens; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def rows_rejected(self) -> int:
        """Staged rows that no commit kept."""
        return self.rows_staged - self.rows_committed

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of drafts accepted at depth 1, 2, ..., where those before were accepted and a draft stood there."""
        depths = range(1, max(self.tried_at, default=0) + 1)
        return [self.accepted_at.get(d, 0) / self.tried_at[d] for d in depths]

    def phase_ms(self, *phases: str) -> float:
        """Time that some phases took together, a step (ms)."""
        total = sum(self.phases[phase].total_ms for phase in phases if phase in self.phases)
        return total / self.rounds if self.rounds else 0.0

    @property
    def step_ms(self) -> float:
        """Time of one step, all phases together (ms)."""
        return self.phase_ms(*self.phases)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "rounds": self.rounds,
            "row_rounds": self.row_rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "tau": self.tau,
            "acceptance": self.acceptance,
            "acceptance_by_depth": self.acceptance_by_depth,
            "tried_by_depth": [self.tried_at.get(d, 0) for d in range(1, max(self.tried_at, default=0) + 1)],
            "rows_staged": self.rows_staged,
            "rows_committed": self.rows_committed,
            "rows_rejected": self.rows_rejected,
            "bytes_written": self.bytes_written,
            "fallbacks": self.fallbacks,
            "phase_ms": {phase: self.phase_ms(phase) for phase in self.phases},
            "target_ms_by_width": {
                str(width): {"count": cost.count, "mean_ms": cost.mean_ms}
                for width, cost in sorted(self.target_by_width.items())
            },
        }

    def summary(self, seconds: float, drafter: str) -> str:
        """One line: tokens, tokens/s, τ, acceptance, drafter."""
        speed = self.emitted / seconds if seconds > 0 else 0.0
        acceptance = f"acceptance {self.acceptance:.0%}" if self.drafted else "nothing drafted"
        return f"{self.emitted} tokens · {speed:.1f} tokens/s · τ {self.tau:.2f} · {acceptance} · drafter {drafter}"

    def _add_depths(self, record: StepRecord, row: int) -> None:
        accepted = record.accepted_nodes[row]
        for depth in range(1, len(accepted) + 1):
            self.tried_at[depth] = self.tried_at.get(depth, 0) + 1
            self.accepted_at[depth] = self.accepted_at.get(depth, 0) + 1
        last_kept = accepted[-1] if accepted else 0
        nodes = zip(record.draft_tokens[row], record.draft_parents[row], strict=True)
        children = [token for token, parent in nodes if parent == last_kept]
        # A draft that was met, yet not kept, is the token with which the row stopped: no rejection.
        if children and record.emitted[row][-1] not in children:
            self.tried_at[len(accepted) + 1] = self.tried_at.get(len(accepted) + 1, 0) + 1
