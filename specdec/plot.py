"""Figures from the reports of `specdec bench`: speed, τ and acceptance.  Needs matplotlib."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ConfigError, UnsupportedError, choose

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMAT = "specdec-bench/1"

MOST_DEPTHS = 16
"""Depths that the figure of acceptance shows."""

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#000000")
"""Distinguishable by most people with colour blindness (Okabe and Ito 2008)."""


@dataclass(frozen=True)
class BenchData:
    """What the figures need of a report."""

    groups: dict[str, dict[str, dict[str, Any]]]
    """Category → system → its figures."""
    caption: str

    @property
    def systems(self) -> list[str]:
        """Names of the systems, the reference first."""
        return list(next(iter(self.groups.values())))

    @property
    def speculative(self) -> list[str]:
        """Systems whose steps were counted and that drafted."""
        overall = next(iter(self.groups.values()))
        return [name for name, found in overall.items() if found.get("stats", {}).get("drafted")]

    def colour(self, system: str) -> str:
        """The same in every figure."""
        return COLOURS[self.systems.index(system) % len(COLOURS)]


def read(path: Path) -> BenchData:
    """Read the JSON of a report.  Raises `ConfigError` for anything else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as failure:
        raise ConfigError(f"{path} cannot be read: {failure}; accepted: report.json of `specdec bench`") from failure
    found = report.get("format") if isinstance(report, dict) else None
    if found != FORMAT or not report.get("groups"):
        raise ConfigError(f"{path}: format {found!r}; accepted: {FORMAT}, as `specdec bench --output` writes it")
    return BenchData(report["groups"], caption_of(report))


def caption_of(report: dict[str, Any]) -> str:
    """Under which conditions the figures were measured, in one line."""
    settings, machine = report.get("settings", {}), report.get("machine", {})
    hardware = machine.get("gpu") or machine.get("cpu") or settings.get("device")
    parts = [settings.get("model"), settings.get("dtype"), hardware, str(report.get("date", ""))[:10]]
    return " · ".join(str(part) for part in parts if part)


def draw(name: str, data: BenchData) -> Figure:
    """One figure by name.  Raises `UnsupportedError` where matplotlib is missing."""
    plot = choose("figure", name, FIGURES)
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("figures need the package matplotlib; accepted: pip install 'specdec-torch[plot]'")
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.subplots()
    plot(axes, data)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")
    figure.supxlabel(data.caption, fontsize="x-small", color="#666666")
    return figure


def plot_throughput(axes: Axes, data: BenchData) -> None:
    """Tokens a second of every system, by category."""
    bars(axes, data, data.systems, lambda found: (found.get("tokens_per_second"), None))
    axes.set_ylabel("tokens/s, prefill included")


def plot_speedup(axes: Axes, data: BenchData) -> None:
    """How many times as fast as `model.generate()`, by category: medians with 95% intervals."""
    systems = [name for name in data.systems if name != "hf"]
    bars(axes, data, systems, lambda found: of_interval(found.get("over_hf")))
    axes.axhline(1.0, color="#666666", linewidth=1, linestyle="--")
    axes.set_ylabel("× model.generate()")


def plot_tau(axes: Axes, data: BenchData) -> None:
    """Tokens gained from one target forward, by category."""
    bars(axes, data, data.speculative, lambda found: (found.get("stats", {}).get("tau"), None))
    axes.axhline(1.0, color="#666666", linewidth=1, linestyle="--")
    axes.set_ylabel("τ (tokens per target forward)")


def plot_acceptance(axes: Axes, data: BenchData) -> None:
    """Share of drafts accepted at each depth, where those above were accepted."""
    overall = next(iter(data.groups.values()))
    lines = {name: overall[name]["stats"]["acceptance_by_depth"][:MOST_DEPTHS] for name in data.speculative}
    for name, shares in lines.items():
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name, color=data.colour(name))
    axes.set_ylim(0.0, 1.02)
    axes.set_xticks(range(1, 1 + max(map(len, lines.values()), default=1)))
    axes.set_xlabel("depth of the draft")
    axes.set_ylabel("accepted, given those above")


FIGURES: dict[str, Callable[[Axes, BenchData], None]] = {
    "throughput": plot_throughput,
    "speedup": plot_speedup,
    "tau": plot_tau,
    "acceptance": plot_acceptance,
}

Value = tuple[float | None, tuple[float, float] | None]
"""A figure and the interval it lies in, where there is one."""


def of_interval(interval: dict[str, Any] | None) -> Value:
    """The median and its interval."""
    return (None, None) if interval is None else (interval["median"], (interval["low"], interval["high"]))


def bars(axes: Axes, data: BenchData, systems: list[str], value: Callable[[dict[str, Any]], Value]) -> None:
    """One group of bars for each category, one bar for each system; what was not measured has none."""
    width = 0.8 / max(1, len(systems))
    for i, system in enumerate(systems):
        for j, (category, found) in enumerate(data.groups.items()):
            height, interval = value(found.get(system, {}))
            if height is None:
                continue
            place = j + (i - (len(systems) - 1) / 2) * width
            label = system if category == next(iter(data.groups)) else None
            axes.bar(place, height, width, color=data.colour(system), label=label)
            if interval is not None:
                errors = [[max(0.0, height - interval[0])], [max(0.0, interval[1] - height)]]
                axes.errorbar(place, height, yerr=errors, color="black", capsize=2, linewidth=1)
    axes.set_xticks(range(len(data.groups)), list(data.groups), rotation=0 if len(data.groups) < 5 else 30, ha="center")
