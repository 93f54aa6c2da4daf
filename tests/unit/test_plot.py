"""Figures show what the report says, and refuse what is no report."""

from __future__ import annotations

import json
import os

import pytest

from specdec import cli, plot
from specdec.errors import ConfigError

pytest.importorskip("matplotlib")

STATS = {"drafted": 40, "tau": 2.5, "acceptance_by_depth": [0.8, 0.5]}


def report(**changes):
    """A small report of two categories: the reference, plain decoding, and one drafter."""
    ratio = {"median": 1.6, "low": 1.4, "high": 1.9, "count": 8}
    found = {
        "hf": {"tokens_per_second": 10.0},
        "none": {
            "tokens_per_second": 11.0,
            "over_hf": {**ratio, "median": 1.1, "low": 1.0, "high": 1.2},
            "stats": {"drafted": 0},
        },
        "suffix": {"tokens_per_second": 16.0, "over_hf": ratio, "stats": STATS},
    }
    whole = {
        "format": plot.FORMAT,
        "date": "2030-01-02T03:04:05",
        "machine": {"cpu": "Some Processor"},
        "settings": {"model": "some-model", "dtype": "float32"},
        "groups": {"overall": found, "writing": found},
    }
    return {**whole, **changes}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report()))
    return file


def axes_of(name, path):
    [axes] = plot.draw(name, plot.read(path)).axes
    return axes


def bar_heights(axes):
    return sorted(round(patch.get_height(), 6) for patch in axes.patches)


def test_throughput_has_a_bar_for_each_system_and_category(path):
    assert bar_heights(axes_of("throughput", path)) == [10.0, 10.0, 11.0, 11.0, 16.0, 16.0]


def test_speedup_leaves_the_reference_out_and_draws_intervals(path):
    axes = axes_of("speedup", path)
    assert bar_heights(axes) == [1.1, 1.1, 1.6, 1.6]
    ends = {round(float(y), 6) for lines in axes.collections for line in lines.get_segments() for _, y in line}
    assert {1.4, 1.9, 1.0, 1.2} <= ends


def test_withheld_speedups_have_no_bar(path):
    data = report()
    del data["groups"]["overall"]["suffix"]["over_hf"]
    path.write_text(json.dumps(data))
    assert bar_heights(axes_of("speedup", path)) == [1.1, 1.1]


def test_tau_and_acceptance_show_drafting_systems_only(path):
    assert bar_heights(axes_of("tau", path)) == [2.5, 2.5]
    [line] = axes_of("acceptance", path).lines
    assert line.get_label() == "suffix"
    assert line.get_xdata().tolist() == [1, 2] and line.get_ydata().tolist() == [0.8, 0.5]


def test_the_caption_says_what_was_measured_on_what(path):
    assert plot.read(path).caption == "some-model · float32 · Some Processor · 2030-01-02"


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"format": "other/1", "groups": {"overall": {}}})])
def test_other_files_are_refused(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"specdec bench"):
        plot.read(file)


def test_unknown_figures_are_refused(path):
    with pytest.raises(ConfigError, match="acceptance, speedup, tau, throughput"):
        plot.draw("speed", plot.read(path))


def test_the_command_writes_all_figures(path, tmp_path):
    assert cli.run(["plot", str(path), "--output", str(tmp_path / "figures")], os.environ) == 0
    written = sorted(file.name for file in (tmp_path / "figures").iterdir())
    assert written == ["acceptance.svg", "speedup.svg", "tau.svg", "throughput.svg"]
    assert cli.run(["plot", str(path), "--figure", "tau", "--format", "png"], os.environ) == 0
    assert (path.parent / "tau.png").read_bytes().startswith(b"\x89PNG")
    assert cli.run(["plot", str(path), "--format", "gif"], os.environ) == 2
