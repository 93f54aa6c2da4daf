"""Nsight Compute's CSV exports: how many bytes each kernel writes to DRAM and to L2.

Read are both layouts of `ncu --csv`: one line per kernel and metric (the default), or one line per kernel with a column
per metric and units in the line below the header (`--page raw`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specdec.bench.report import table
from specdec.errors import ConfigError

DRAM_WRITES = "dram__bytes_write.sum"
L2_WRITES = "lts__t_bytes_op_write.sum"
METRICS = (DRAM_WRITES, L2_WRITES)

UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "sector": 32}


@dataclass
class KernelWrites:
    """All launches of one kernel."""

    name: str
    launches: int = 0
    dram_bytes: float = 0.0
    l2_bytes: float = 0.0


def read_ncu_csv(path: Path) -> list[KernelWrites]:
    """Sums per kernel, those that write most to DRAM first.

    Raises `ConfigError`, naming file and what is missing, where the export lacks the write metrics.
    """
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"csv={str(path)!r} is no file; accepted: what `ncu --csv` printed")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    # ncu prints what the program says, and notes of its own beginning with ==, before the table.
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise ConfigError(f'{path} has no line that begins with "ID"; accepted: what `ncu --csv` printed')
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[first:]))))
    kernels: dict[str, KernelWrites] = {}
    launches: dict[str, set[str]] = {}
    found: set[str] = set()
    for launch, name, metric, value in (
        _long(path, rows) if "Metric Name" in (rows[0] if rows else {}) else _wide(path, rows)
    ):
        kernel = kernels.setdefault(name, KernelWrites(name))
        launches.setdefault(name, set()).add(launch)
        found.add(metric)
        if metric == DRAM_WRITES:
            kernel.dram_bytes += value
        else:
            kernel.l2_bytes += value
    missing = [metric for metric in METRICS if metric not in found]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; accepted: exports with --metrics {','.join(METRICS)}")
    for name, kernel in kernels.items():
        kernel.launches = len(launches[name])
    return sorted(kernels.values(), key=lambda kernel: -kernel.dram_bytes)


Sample = tuple[str, str, str, float]
"""`(launch, kernel, metric, bytes)`."""


def _long(path: Path, rows: list[dict[str, str]]) -> Iterator[Sample]:
    for row in rows:
        if row["Metric Name"] in METRICS:
            value = _bytes(path, row["Metric Value"], row["Metric Unit"])
            yield row["ID"], row["Kernel Name"], row["Metric Name"], value


def _wide(path: Path, rows: list[dict[str, str]]) -> Iterator[Sample]:
    units, kernels = (rows[0], rows[1:]) if rows else ({}, [])
    for row in kernels:
        for metric in METRICS:
            if row.get(metric):
                yield row["ID"], row["Kernel Name"], metric, _bytes(path, row[metric], units[metric])


def _bytes(path: Path, value: str, unit: str) -> float:
    if unit not in UNITS:
        raise ConfigError(f"{path}: unit {unit!r}; accepted: {', '.join(UNITS)}")
    return float(value.replace(",", "")) * UNITS[unit]


def as_markdown(kernels: list[KernelWrites], top: int = 20) -> str:
    """A table of the kernels that write most, and the sum over all."""
    listed = [(kernel.name, kernel.launches, kernel.dram_bytes, kernel.l2_bytes) for kernel in kernels[:top]]
    sums = [sum(getattr(kernel, name) for kernel in kernels) for name in ("launches", "dram_bytes", "l2_bytes")]
    rows = [
        [name[:80], str(int(launches)), f"{dram / 1e6:.3f}", f"{l2 / 1e6:.3f}"]
        for name, launches, dram, l2 in [*listed, ("all kernels", *sums)]
    ]
    return table(("kernel", "launches", "DRAM written, MB", "L2 written, MB"), rows) + "\n"
