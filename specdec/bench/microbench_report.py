"""Figures of the micro-benchmark, and how they are told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.bench.microbench import Cell, MicrobenchConfig
from specdec.bench.report import number, table
from specdec.stats import SpecStats


@dataclass(frozen=True)
class CellFigures:
    """One writer with one verifier."""

    writer: str
    verifier: str
    latency_mean_ms: float
    latency_p50_ms: float
    latency_p95_ms: float
    latency_spread: float
    """(P95 - P5) / P50 of the batches' latencies."""
    relative_latency: float
    """Median, over batches, of the latency over the first cell's."""
    tokens_per_second: float
    rows_staged: int
    rows_committed: int
    rows_rejected: int
    writes_saved: float
    """Share of the staged rows' bytes that were never written (negative where more was)."""
    page_bytes_per_token: float
    """Bytes of K/V written for each emitted token, over the bytes of one token's K/V."""
    accepted_per_window: float
    """Accepted drafts of a row in one step."""
    acceptance: float
    """Accepted share of the drafted tokens."""
    reserved_page_bytes: int
    """Most bytes of pages held at once, over all batches."""
    used_page_bytes: int
    """Most bytes that committed tokens took."""
    device_peak_bytes: int | None
    equal: bool
    """Every output equals the first cell's."""
    fallbacks: dict[str, int]


def figures(cells: Sequence[Cell]) -> list[CellFigures]:
    """The figures of all cells; the first is what the others are compared with."""
    return [figures_of(cell, cells[0]) for cell in cells]


def figures_of(cell: Cell, first: Cell) -> CellFigures:
    """One cell's figures."""
    latencies = np.array([run.seconds for run in cell.runs]) * 1e3
    ratios = [ours.seconds / theirs.seconds for ours, theirs in zip(cell.runs, first.runs, strict=True)]
    stats = SpecStats.of(record for run in cell.runs for record in run.records)
    per_token = cell.runs[0].bytes_per_token
    low, middle, high = np.percentile(latencies, [5, 50, 95])
    return CellFigures(
        writer=cell.writer,
        verifier=cell.verifier,
        latency_mean_ms=float(latencies.mean()),
        latency_p50_ms=float(middle),
        latency_p95_ms=float(high),
        latency_spread=float((high - low) / middle),
        relative_latency=float(np.median(ratios)),
        tokens_per_second=stats.emitted / sum(run.seconds for run in cell.runs),
        rows_staged=stats.rows_staged,
        rows_committed=stats.rows_committed,
        rows_rejected=stats.rows_rejected,
        writes_saved=1 - stats.bytes_written / (stats.rows_staged * per_token),
        page_bytes_per_token=stats.bytes_written / (stats.emitted * per_token),
        accepted_per_window=stats.accepted / stats.row_rounds,
        acceptance=stats.acceptance,
        reserved_page_bytes=max(run.reserved_bytes for run in cell.runs),
        used_page_bytes=max(run.used_bytes for run in cell.runs),
        device_peak_bytes=max((run.device_peak_bytes or 0 for run in cell.runs), default=0) or None,
        equal=all(ours.tokens == theirs.tokens for ours, theirs in zip(cell.runs, first.runs, strict=True)),
        fallbacks=stats.fallbacks,
    )


COLUMNS = (
    "writer",
    "verifier",
    "mean ms",
    "P50 ms",
    "P95 ms",
    "spread",
    "vs first",
    "tokens/s",
    "staged",
    "committed",
    "rejected",
    "saved",
    "bytes/token",
    "accepted/window",
    "acceptance",
    "reserved MiB",
    "used MiB",
    "equal",
)


def as_markdown(cells: Sequence[CellFigures], config: MicrobenchConfig, settings: dict[str, Any]) -> str:
    """A table with a line per cell, and what was run."""
    drafter = config.drafter
    if config.synthetic_acceptance is not None:
        drafter = f"synthetic, right with probability {config.synthetic_acceptance}"
    lines = [
        "# Writers × verifiers",
        "",
        f"{settings['model']} ({settings['dtype']}, {settings['device']}); {config.requests} requests × "
        f"{config.max_new_tokens} tokens, prompts {config.scenario}, {config.draft_tokens} drafts a step, drafter "
        f"{drafter}, temperature {config.temperature:g}, {config.batches} batches a cell, cells interleaved.",
        "",
        table(COLUMNS, [_line(cell) for cell in cells]),
    ]
    for cell in cells:
        for reason, count in cell.fallbacks.items():
            lines.append(f"- {cell.writer} × {cell.verifier}: {count} steps {reason}")
    return "\n".join(lines).rstrip() + "\n"


def _line(cell: CellFigures) -> list[str]:
    return [
        cell.writer,
        cell.verifier,
        number(cell.latency_mean_ms, 1),
        number(cell.latency_p50_ms, 1),
        number(cell.latency_p95_ms, 1),
        f"{cell.latency_spread:.1%}",
        f"{cell.relative_latency:.3f}×",
        number(cell.tokens_per_second, 1),
        str(cell.rows_staged),
        str(cell.rows_committed),
        str(cell.rows_rejected),
        f"{cell.writes_saved:.1%}",
        f"{cell.page_bytes_per_token:.2f}×",
        number(cell.accepted_per_window, 2),
        f"{cell.acceptance:.1%}",
        number(cell.reserved_page_bytes / 2**20, 2),
        number(cell.used_page_bytes / 2**20, 2),
        "yes" if cell.equal else "NO",
    ]


def write(
    cells: Sequence[CellFigures],
    config: MicrobenchConfig,
    settings: dict[str, Any],
    origin: dict[str, Any],
    verification: list[dict[str, Any]],
    path: Path,
) -> None:
    """Write everything as JSON."""
    content = {
        "settings": settings,
        "config": asdict(config),
        "provenance": origin,
        "cells": [asdict(cell) for cell in cells],
        "verification_us": verification,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
