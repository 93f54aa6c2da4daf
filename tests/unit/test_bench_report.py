"""Statistics and reports, from measurements written by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.bench.measure import BenchConfig, Divergence, Measurement, RunTimes
from specdec.bench.provenance import commit_of, cpu_name, provenance
from specdec.bench.report import Report, as_dict, as_markdown, table, write
from specdec.bench.statistics import Interval, StepCost, group_by_category, median_interval
from specdec.errors import ConfigError
from specdec.stats import PhaseCost, SpecStats


def stats(rounds: int, emitted: int, **phases: float) -> SpecStats:
    costs = {phase: PhaseCost(rounds, rounds * ms) for phase, ms in phases.items()}
    accepted = emitted - rounds
    return SpecStats(
        rounds=rounds,
        row_rounds=rounds,
        drafted=2 * accepted,
        accepted=accepted,
        emitted=emitted,
        tried_at={1: rounds} if accepted else {},
        accepted_at={1: accepted} if accepted else {},
        phases=costs,
        target_by_width={1 + bool(accepted): PhaseCost(rounds, rounds * phases["target"])},
    )


def measured(question: int, category: str, system: str, seconds: float, **more: object) -> Measurement:
    run = RunTimes(tokens=100, seconds=seconds, decode_tokens=99, decode_seconds=seconds - 0.1)
    fields = {"repeatable": True, "divergence": None, "stats": None, **more}
    return Measurement(question, category, 0, system, 10, 100, (run, run), **fields)  # type: ignore[arg-type]


def make_report(divergence: Divergence | None = None, dtype: str = "float32", temperature: float = 0.0) -> Report:
    found = []
    for question, category, speedup in ((1, "maths", 2.0), (2, "maths", 4.0), (3, "prose", 1.0)):
        found += [
            measured(question, category, "hf", 4.1),
            measured(question, category, "none", 4.1, stats=stats(100, 100, draft=0.0, target=40.0, commit=1.0)),
            measured(
                question,
                category,
                "suffix",
                4.0 / speedup + 0.1,
                stats=stats(50, 100, draft=1.0, target=41.0, verify=0.5, observe=0.5, commit=1.0),
                divergence=divergence if question == 2 else None,
            ),
        ]
    origin = provenance(torch.device("cpu"))
    settings = {"model": "tiny", "dtype": dtype, "device": "cpu"}
    return Report(settings, BenchConfig(temperature=temperature), origin, tuple(found))


# --- statistics --------------------------------------------------------------------------------------------------


def test_the_interval_holds_the_median_and_depends_on_the_seed_alone() -> None:
    values = list(np.random.default_rng(1).normal(2.0, 0.3, size=41))
    found = median_interval(values, seed=7)
    assert found is not None
    assert found == median_interval(values, seed=7)
    assert found.low < found.median < found.high
    assert found.median == pytest.approx(float(np.median(values)))
    narrower = median_interval(values, seed=7, confidence=0.5)
    assert narrower is not None and found.low < narrower.low <= narrower.high < found.high


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    intervals = [median_interval(list(rng.normal(1.5, 1.0, size=30)), resamples=400) for _ in range(200)]
    covered = sum(found is not None and found.low <= 1.5 <= found.high for found in intervals)
    assert 0.88 <= covered / 200 <= 0.99


def test_few_values() -> None:
    assert median_interval([]) is None
    assert median_interval([2.0]) == Interval(2.0, 2.0, 2.0, 1)
    with pytest.raises(ConfigError, match="confidence=1"):
        median_interval([1.0], confidence=1.0)


def test_ratios_are_taken_turn_by_turn() -> None:
    overall, maths, prose = group_by_category(make_report().measurements)
    assert [group.name for group in (overall, maths, prose)] == ["overall", "maths", "prose"]
    decode = overall.ratios("suffix", "hf", lambda m: m.decode_tokens_per_second)
    assert decode == pytest.approx([2.0, 4.0, 1.0])
    ratio = maths.ratio("suffix", "hf", lambda m: m.decode_tokens_per_second)
    assert ratio is not None and (ratio.median, ratio.low, ratio.high) == pytest.approx((3.0, 2.0, 4.0))
    assert prose.tokens_per_second("hf") == pytest.approx(100 / 4.1)
    assert overall.decode_tokens_per_second("suffix") == pytest.approx(297 / (2.0 + 1.0 + 4.0))
    assert overall.ratios("suffix", "hf", lambda m: None if m.question_id == 2 else 1.0) == [1.0, 1.0]


def test_step_costs_give_the_expected_speed_up() -> None:
    overall = group_by_category(make_report().measurements)[0]
    ours, plain = overall.stats("suffix"), overall.stats("none")
    assert ours is not None and plain is not None
    cost = StepCost.of(ours, plain)
    assert (cost.plain, cost.draft, cost.verify, cost.rest) == pytest.approx((41.0, 1.5, 41.5, 1.0))
    assert cost.expected_speedup == pytest.approx(2.0 * 41.0 / 44.0)
    assert overall.stats("hf") is None


# --- reports -----------------------------------------------------------------------------------------------------


def test_the_files_say_the_same(tmp_path: Path) -> None:
    report = make_report()
    data_path, page_path = write(report, tmp_path / "new" / "folder")
    data, page = json.loads(data_path.read_text(encoding="utf-8")), page_path.read_text(encoding="utf-8")
    assert data == json.loads(json.dumps(as_dict(report)))
    assert {"format", "date", "commit", "versions", "machine", "seed", "settings", "config"} < data.keys()
    assert data["machine"]["threads"] == torch.get_num_threads()
    assert torch.__version__.startswith(data["versions"]["torch"].partition("+")[0])
    assert len(data["measurements"]) == 9
    suffix = data["groups"]["overall"]["suffix"]
    assert suffix["decode_over_hf"]["median"] == pytest.approx(2.0)
    assert suffix["stats"]["tau"] == 2.0
    assert (suffix["turns"], suffix["identical_turns"]) == (3, 3)
    assert "2.00 [1.00, 4.00]" in page
    for title in ("## Speed", "## Acceptance by position", "## Cost of a step"):
        assert title in page
    assert page.rstrip().endswith("None.")


def test_windows_are_binned_by_width() -> None:
    widths = {1: PhaseCost(2, 20.0), 3: PhaseCost(1, 11.0), 4: PhaseCost(3, 37.0), 5: PhaseCost(1, 9.0)}
    plain = stats(10, 10, target=10.0)
    found = [
        measured(1, "a", "hf", 1.0),
        measured(1, "a", "none", 1.0, stats=plain),
        measured(1, "a", "suffix", 1.0, stats=dataclasses.replace(plain, target_by_width=widths)),
    ]
    page = as_markdown(Report({"dtype": "float32"}, BenchConfig(), provenance(torch.device("cpu")), tuple(found)))
    section = page.partition("## Target forward")[2].partition("## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in section.splitlines() if "| suffix" in line]
    expected = [["1", "2", "10.00", "1.00"], ["3 to 4", "4", "12.00", "1.20"], ["5 to 8", "1", "9.00", "0.90"]]
    assert rows == expected


def test_losses_are_shown() -> None:
    slow = [measured(1, "maths", "hf", 1.0), measured(1, "maths", "suffix", 2.0)]
    page = as_markdown(Report({"dtype": "float32"}, BenchConfig(), provenance(torch.device("cpu")), tuple(slow)))
    assert "0.50 [0.50, 0.50]" in page


@pytest.mark.parametrize(
    ("dtype", "gap", "temperature", "withheld"),
    [
        ("float32", 1e-6, 0.0, True),
        ("float32", 1e-6, 0.7, True),
        ("bfloat16", 0.1, 0.0, False),
        ("bfloat16", 3.0, 0.0, True),
        ("bfloat16", 3.0, 0.7, False),
    ],
)
def test_speed_ups_are_withheld_where_tokens_are_wrong(
    dtype: str, gap: float, temperature: float, withheld: bool
) -> None:
    report = make_report(Divergence(5, gap), dtype, temperature)
    assert report.distrusted == ({"suffix"} if withheld else set())
    page, data = as_markdown(report), as_dict(report)
    assert ("withheld" in page) == withheld
    assert ("over_hf" in data["groups"]["overall"]["suffix"]) == (not withheld)
    assert "over_hf" in data["groups"]["overall"]["none"]
    assert data["groups"]["overall"]["suffix"]["identical_turns"] == 2
    row = next(
        line for line in page.splitlines() if line.startswith("| suffix") and line.rstrip(" |").endswith(f"{gap:.4f}")
    )
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["2", "1", "5"]


def test_other_systems_own_differences_are_shown_only() -> None:
    found = [measured(1, "a", "hf", 1.0), measured(1, "a", "hf lookup 3", 0.5, divergence=Divergence(0, 2.0))]
    report = Report({"dtype": "float32"}, BenchConfig(), provenance(torch.device("cpu")), tuple(found))
    assert report.wrong == []
    assert "| hf lookup 3" in as_markdown(report)


def test_tables_line_up_and_escape_bars() -> None:
    lines = table(["a|b", "long title"], [["x", "1"], ["y", "22"]]).splitlines()
    assert lines[0] == r"| a\|b | long title |"
    assert lines[1] == "| ---- | ---------: |"
    assert lines[3] == "| y    |         22 |"
    assert len({len(line) for line in lines}) == 1


# --- provenance --------------------------------------------------------------------------------------------------


def test_provenance_knows_processor_and_commit(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some Chip @ 2 GHz\n", encoding="utf-8")
    assert cpu_name(cpuinfo) == "Some Chip @ 2 GHz"
    assert cpu_name(tmp_path / "missing")
    assert commit_of(cpuinfo) is None  # outside of any repository
    found = provenance(torch.device("cpu"))
    assert found["date"].endswith("+00:00")
    assert math.isfinite(found["machine"]["cores"])
