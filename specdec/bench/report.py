"""Reports: one object for machines (JSON), one page for people (Markdown)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.bench.measure import BenchConfig, Measurement
from specdec.bench.statistics import OVERALL, Group, Interval, StepCost, group_by_category
from specdec.bench.systems import HF, PLAIN

FORMAT = "specdec-bench/1"

LARGE_GAP = 1.0
"""Top-2 gap of the logits beyond which rounding in half precision is no explanation of different tokens."""

SHOWN_DEPTHS = 8
"""Positions in the table of acceptance; the JSON has all."""

SHOWN_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Largest windows of the bins in the table of widths; the JSON has every width by itself."""


@dataclass(frozen=True)
class Report:
    """Everything that was measured, and under which conditions."""

    settings: dict[str, Any]
    """Model, dtype, device, workload, ...: whatever the caller wants known."""
    config: BenchConfig
    provenance: dict[str, Any]
    measurements: tuple[Measurement, ...]

    @property
    def systems(self) -> list[str]:
        """Names of the systems, the reference first."""
        return list(dict.fromkeys(measurement.system for measurement in self.measurements))

    @property
    def groups(self) -> list[Group]:
        """All turns, then each category."""
        return group_by_category(self.measurements)

    @property
    def is_exact(self) -> bool:
        """Whether every token must be the reference's: in fp32."""
        return self.settings["dtype"] == "float32"

    @property
    def wrong(self) -> list[Measurement]:
        """Turns that specdec decoded to other tokens than the reference and should not have.

        In fp32 none may.  In half precision windows of different shapes round differently, so greedy text may part
        where the two largest logits are close together; sampled text is not checked there.
        """
        return [measurement for measurement in self.measurements if self._is_wrong(measurement)]

    def _is_wrong(self, measurement: Measurement) -> bool:
        divergence = measurement.divergence
        if divergence is None or measurement.stats is None:
            return False
        return self.is_exact or (self.config.temperature == 0.0 and divergence.top_2_gap > LARGE_GAP)

    @property
    def distrusted(self) -> set[str]:
        """Systems whose speed-ups are withheld because some of their tokens are wrong."""
        return {measurement.system for measurement in self.wrong}


def as_dict(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "format": FORMAT,
        **report.provenance,
        "seed": report.config.seed,
        "settings": report.settings,
        "config": asdict(report.config),
        "distrusted": sorted(report.distrusted),
        "groups": {group.name: _group_dict(report, group) for group in report.groups},
        "measurements": [_measurement_dict(measurement) for measurement in report.measurements],
    }


def write(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write `report.json` and `report.md` into a folder, which is made if it is not there; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "report.json", folder / "report.md"
    data.write_text(json.dumps(as_dict(report), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    page.write_text(as_markdown(report), encoding="utf-8")
    return data, page


def _group_dict(report: Report, group: Group) -> dict[str, Any]:
    return {system: _system_dict(report, group, system) for system in report.systems}


def _system_dict(report: Report, group: Group, system: str) -> dict[str, Any]:
    stats, identical = group.stats(system), group.identical(system)
    found: dict[str, Any] = {
        "turns": identical[1],
        "identical_turns": identical[0],
        "tokens_per_second": group.tokens_per_second(system),
        "decode_tokens_per_second": group.decode_tokens_per_second(system),
    }
    for base in (HF, PLAIN):
        if base in group.by_system and system not in report.distrusted:
            found[f"over_{base}"] = _as_dict(whole_ratio(report, group, system, base))
            found[f"decode_over_{base}"] = _as_dict(decode_ratio(report, group, system, base))
    if stats is not None:
        found["stats"] = stats.to_dict()
        cost = step_cost(group, system)
        if cost is not None:
            found["step_cost"] = {**asdict(cost), "expected_speedup": cost.expected_speedup}
    return found


def _measurement_dict(measurement: Measurement) -> dict[str, Any]:
    rates = {
        "tokens_per_second": measurement.tokens_per_second,
        "decode_tokens_per_second": measurement.decode_tokens_per_second,
    }
    stats = None if measurement.stats is None else measurement.stats.to_dict()
    return {**asdict(measurement), **rates, "stats": stats}


def _as_dict(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else asdict(interval)


def whole_ratio(report: Report, group: Group, system: str, base: str) -> Interval | None:
    """Median ratio of tokens/s, prefill included."""
    return group.ratio(system, base, lambda measurement: measurement.tokens_per_second, report.config.seed)


def decode_ratio(report: Report, group: Group, system: str, base: str) -> Interval | None:
    """Median ratio of tokens/s behind the first emission."""
    return group.ratio(system, base, lambda measurement: measurement.decode_tokens_per_second, report.config.seed)


def step_cost(group: Group, system: str) -> StepCost | None:
    """Cost of the system's steps beside plain decoding's, where both have steps."""
    stats = group.stats(system)
    plain = group.stats(PLAIN) if PLAIN in group.by_system else None
    return None if stats is None or plain is None else StepCost.of(stats, plain)


def as_markdown(report: Report) -> str:
    """The report as a page."""
    overall = report.groups[0]
    parts = [
        "# Benchmark",
        *_conditions(report),
        *_wrong(report),
        "## Speed",
        SPEED_NOTE,
        table(SPEED_COLUMNS, [row for group in report.groups for row in _speed_rows(report, group)]),
        "## Acceptance by position",
        "Share of drafts accepted at each depth, where those before were accepted and a draft stood there.",
        table(["system", *map(str, range(1, SHOWN_DEPTHS + 1))], _acceptance_rows(report, overall)),
        "## Cost of a step",
        COST_NOTE,
        table(COST_COLUMNS, _cost_rows(report, overall)),
        "## Target forward and walk, by nodes of the window",
        table(["system", "nodes", "steps", "ms", "/ T_plain"], _width_rows(report, overall)),
        "## Tokens that differ from the reference's",
        *_divergences(report),
    ]
    return "\n\n".join(parts) + "\n"


SPEED_COLUMNS = ["category", "turns", "system", "tokens/s", "× hf", "decode tokens/s", "× hf", "× none"]
SPEED_COLUMNS += ["τ", "acceptance", "identical"]
SPEED_NOTE = (
    "Tokens/s: all tokens over all time, prefill included. Decode: tokens behind the first emission over the time from "
    "the first emission to the last. ×: median over turns of the ratio of tokens/s, with a 95% bootstrap interval. "
    "`hf` is `model.generate()`, `none` our own plain decoding. τ: tokens gained from a target forward."
)
COST_COLUMNS = [
    "system",
    "T_plain (ms)",
    "T_draft / T_plain",
    "T_verify / T_plain",
    "rest / T_plain",
    "τ",
    "expected ×",
]
COST_COLUMNS += ["measured ×"]
COST_NOTE = (
    "T_plain: one step of plain decoding. T_draft: drafting and observing. T_verify: target forward and walk. Rest: "
    "the commit. Expected: τ·T_plain / (T_draft + T_verify + rest), from the steps' own clocks; measured: decode "
    "tokens/s over that of `none`. They differ by what happens outside of steps."
)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that reads well as plain text too, the first column to the left, the others to the right."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (columns, *rows)]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(columns))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        for line in cells
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))


def _conditions(report: Report) -> list[str]:
    machine, versions = report.provenance["machine"], report.provenance["versions"]
    facts = {
        **report.settings,
        **asdict(report.config),
        "machine": ", ".join(f"{name} {value}" for name, value in machine.items()),
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None),
        "commit": report.provenance["commit"] or "not known",
        "date": report.provenance["date"],
    }
    return [table(["", ""], [[name.replace("_", " "), str(value)] for name, value in facts.items()])]


def _wrong(report: Report) -> list[str]:
    if not report.wrong:
        return []
    names = ", ".join(sorted(report.distrusted))
    return [f"**Tokens of {names} differ from the reference's where they must not; their speed-ups are withheld.**"]


def _speed_rows(report: Report, group: Group) -> Iterable[list[str]]:
    for system in report.systems:
        stats, identical = group.stats(system), group.identical(system)
        trusted = system not in report.distrusted
        plain = PLAIN if PLAIN in group.by_system else HF
        yield [
            f"**{group.name}**" if group.name == OVERALL else group.name,
            str(identical[1]),
            system,
            number(group.tokens_per_second(system), 1),
            interval(whole_ratio(report, group, system, HF)) if trusted else "withheld",
            number(group.decode_tokens_per_second(system), 1),
            interval(decode_ratio(report, group, system, HF)) if trusted else "withheld",
            interval(decode_ratio(report, group, system, plain)) if trusted and plain == PLAIN else "–",
            number(stats.tau if stats else None, 2),
            f"{stats.acceptance:.0%}" if stats and stats.drafted else "–",
            f"{identical[0]}/{identical[1]}",
        ]


def _acceptance_rows(report: Report, group: Group) -> Iterable[list[str]]:
    for system in report.systems:
        stats = group.stats(system)
        if stats is not None and stats.drafted:
            shares = [f"{share:.2f}" for share in stats.acceptance_by_depth[:SHOWN_DEPTHS]]
            yield [system, *shares, *["–"] * (SHOWN_DEPTHS - len(shares))]


def _cost_rows(report: Report, group: Group) -> Iterable[list[str]]:
    for system in report.systems:
        cost = step_cost(group, system)
        if cost is None:
            continue
        ours, plain = group.decode_tokens_per_second(system), group.decode_tokens_per_second(PLAIN)
        measured = ours / plain if ours and plain else None
        shares = [number(part / cost.plain, 3) for part in (cost.draft, cost.verify, cost.rest)]
        expected = number(cost.expected_speedup, 2)
        yield [system, number(cost.plain, 2), *shares, number(cost.tau, 2), expected, number(measured, 2)]


def _width_rows(report: Report, group: Group) -> Iterable[list[str]]:
    for system in report.systems:
        stats, cost = group.stats(system), step_cost(group, system)
        for low, high in zip((1, *(w + 1 for w in SHOWN_WIDTHS)), SHOWN_WIDTHS, strict=False):
            spent = [c for width, c in stats.target_by_width.items() if low <= width <= high] if stats else []
            if spent:
                count = sum(c.count for c in spent)
                mean = sum(c.total_ms for c in spent) / count
                nodes = str(low) if low == high else f"{low} to {high}"
                yield [system, nodes, str(count), number(mean, 2), number(mean / cost.plain if cost else None, 2)]


def _divergences(report: Report) -> list[str]:
    rows = [
        [m.system, str(m.question_id), str(m.turn + 1), str(m.divergence.index), number(m.divergence.top_2_gap, 4)]
        for m in report.measurements
        if m.divergence is not None
    ]
    unsteady = sorted({m.system for m in report.measurements if not m.repeatable})
    notes = [f"Runs of {', '.join(unsteady)} gave different tokens from one run to the next."] if unsteady else []
    if not rows:
        return ["None.", *notes]
    return [table(["system", "question", "turn", "first at token", "top-2 gap of the logits"], rows), *notes]


def number(value: float | None, digits: int) -> str:
    """A figure with some digits, a dash for none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def interval(value: Interval | None) -> str:
    """A median with its interval."""
    return "–" if value is None else f"{value.median:.2f} [{value.low:.2f}, {value.high:.2f}]"
