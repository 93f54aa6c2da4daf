"""The micro-benchmark: its grid, its figures, its commands."""

from __future__ import annotations

import json

import pytest
import torch

from specdec import cli
from specdec.bench.microbench import MicrobenchConfig, make_batches, microbench
from specdec.bench.microbench_report import as_markdown, figures
from specdec.bench.ncu import DRAM_WRITES, L2_WRITES, read_ncu_csv
from specdec.bench.ncu import as_markdown as ncu_markdown
from specdec.bench.verification import verification_times
from specdec.errors import ConfigError
from specdec.hf.tiny import tiny_model
from tests.models import tiny_llama

SMALL = dict(requests=3, batches=2, max_new_tokens=12, prompt_count=6, synthetic_acceptance=0.7)
SETTINGS = {"model": "tiny", "dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def grid():
    config = MicrobenchConfig(**SMALL)
    return figures(microbench(tiny_llama(), None, config)), config


def test_every_combination_says_the_same(grid):
    cells, _ = grid
    assert len(cells) == 12 and all(cell.equal for cell in cells)
    assert {(cell.writer, cell.verifier) for cell in cells} == {
        (writer, verifier)
        for writer in ("off", "immediate", "deferred")
        for verifier in ("off", "vectorized", "graph", "adaptive")
    }


def test_deferred_writes_each_token_once_and_the_others_what_they_drafted(grid):
    cells, _ = grid
    for cell in cells:
        emitted = 2 * 3 * 12
        assert cell.rows_committed == emitted
        assert cell.rows_rejected == cell.rows_staged - emitted
        if cell.writer == "deferred":
            assert cell.page_bytes_per_token == 1.0
            assert cell.writes_saved == pytest.approx(cell.rows_rejected / cell.rows_staged)
        else:
            assert cell.page_bytes_per_token == pytest.approx(cell.rows_staged / emitted)
            assert cell.writes_saved == 0.0
        if cell.verifier != "adaptive":
            assert cell.rows_rejected > 0
            assert 0.4 < cell.acceptance < 0.9 and cell.accepted_per_window > 0.5


def test_figures_of_one_verifier_do_not_depend_on_the_writer(grid):
    cells, _ = grid
    counts = {
        (cell.rows_staged, cell.acceptance, cell.accepted_per_window) for cell in cells if cell.verifier == "vectorized"
    }
    assert len(counts) == 1


def test_latencies_and_memory_are_there(grid):
    for cell in grid[0]:
        assert 0 < cell.latency_p50_ms <= cell.latency_p95_ms
        assert cell.reserved_page_bytes >= cell.used_page_bytes > 0
        assert cell.device_peak_bytes is None
    assert grid[0][0].relative_latency == 1.0


def test_fallbacks_are_told(grid):
    cells, config = grid
    [graph] = [cell for cell in cells if (cell.writer, cell.verifier) == ("deferred", "graph")]
    assert any("cuda" in reason for reason in graph.fallbacks)
    text = as_markdown(cells, config, SETTINGS)
    assert "synthetic, right with probability 0.7" in text and "CUDA graphs need cuda" in text
    assert text.count("| deferred") == 4


def test_wide_trees_reserve_less_when_deferred():
    """The direct writer needs a slot for every node of the tree, the deferred one only for the deepest path."""
    config = MicrobenchConfig(
        requests=4,
        batches=1,
        draft_tokens=60,
        siblings=9,
        synthetic_acceptance=0.5,
        max_new_tokens=12,
        warmup=0,
        writers=("off", "deferred"),
        verifiers=("off",),
        prompt_count=4,
    )
    off, deferred = figures(microbench(tiny_llama(), None, config))
    assert off.equal and deferred.equal
    assert deferred.reserved_page_bytes < 0.75 * off.reserved_page_bytes


def test_real_drafters_and_sampling_over_text_prompts():
    model, tokenizer = tiny_model()
    config = MicrobenchConfig(
        requests=2,
        batches=1,
        temperature=0.9,
        top_p=0.9,
        max_new_tokens=8,
        writers=("deferred",),
        verifiers=("off", "vectorized"),
        drafter="ngram",
        prompt_count=2,
    )
    cells = figures(microbench(model, tokenizer, config))
    assert all(cell.equal for cell in cells)


def test_prompts_follow_scenario_and_seed():
    model, tokenizer = tiny_llama(max_position_embeddings=2048), tiny_model()[1]
    config = MicrobenchConfig(scenario="mixed", requests=3, prompt_count=3, batches=1)
    [batch] = make_batches(model, None, config)
    assert batch["attention_mask"].sum(1).tolist() == [32, 256, 1024]
    again = make_batches(model, None, config)[0]
    assert torch.equal(batch["input_ids"], again["input_ids"])
    other = make_batches(model, None, MicrobenchConfig(scenario="mixed", requests=3, batches=1, prompt_seed=1))[0]
    assert not torch.equal(batch["input_ids"], other["input_ids"])
    text = make_batches(model, tokenizer, MicrobenchConfig(requests=2, batches=1))[0]
    assert text["input_ids"].shape == (2, 32)


def test_prompts_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="scenario='long' has prompts of 1024 tokens; accepted: at most 480"):
        make_batches(tiny_llama(), None, MicrobenchConfig(scenario="long"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scenario": "huge"}, "scenario='huge' is not known"),
        ({"writers": ("off", "later")}, "writers='later' is not known"),
        ({"verifiers": ()}, "verifiers='' is not known"),
        ({"verifiers": ("off", "off")}, "every name once"),
        ({"requests": 0}, "requests=0"),
        ({"draft_tokens": 64}, "draft_tokens=64"),
        ({"synthetic_acceptance": 1.5}, "synthetic_acceptance=1.5"),
        ({"profile": "perf"}, "profile='perf'; accepted: nvtx, torch"),
        ({"kv_dtype": "fp4"}, "kv_dtype='fp4'"),
    ],
)
def test_configuration_errors(values, message):
    with pytest.raises(ConfigError, match=message):
        MicrobenchConfig(**values)


def test_verification_by_itself():
    lines = verification_times(3, 4, 101, torch.device("cpu"), torch.float32, repeats=3)
    assert [line["verifier"] for line in lines] == ["off", "vectorized", "graph"]
    assert all(line["host_us"] > 0 and line["device_us"] is None for line in lines)


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    output = tmp_path / "results" / "grid.json"
    line = "microbench --shape tiny --dtype fp32 --device cpu --requests 2 --batches 1 --max-new-tokens 6 --warmup 0"
    line += " --writers off,deferred --verifiers off,vectorized --synthetic-acceptance 0.5 --profile torch --output"
    arguments = [*line.split(), str(output)]
    assert cli.run(arguments, {}) == 0
    printed = capsys.readouterr().out
    content = json.loads(output.read_text())
    assert len(content["cells"]) == 4 and all(cell["equal"] for cell in content["cells"])
    assert content["config"]["writers"] == ["off", "deferred"] and "commit" in content["provenance"]
    assert "verifying by itself, vectorized" in printed and printed.count("| deferred") == 2
    trace = json.loads(output.with_suffix(".trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "specdec.microbench deferred/vectorized" in names


# -- Nsight Compute --------------------------------------------------------------------------------------------------

LONG = f'''==PROF== Connected to process 7
some output of the program
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","gemm","{DRAM_WRITES}","Mbyte","1,234.5"
"0","7","gemm","{L2_WRITES}","Mbyte","2,000"
"0","7","gemm","sm__cycles.sum","cycle","12"
"1","7","commit_rows","{DRAM_WRITES}","byte","640"
"1","7","commit_rows","{L2_WRITES}","Kbyte","1.5"
"2","7","gemm","{DRAM_WRITES}","byte","500,000"
"2","7","gemm","{L2_WRITES}","byte","0"
'''

WIDE = f'''"ID","Kernel Name","{DRAM_WRITES}","{L2_WRITES}","gpu__time_duration.sum"
"","","Kbyte","Mbyte","us"
"0","gemm","1,235,000","2,000","3.1"
"1","commit_rows","0.64","0.0015","1.1"
'''


@pytest.mark.parametrize("text", [LONG, WIDE])
def test_ncu_exports(text, tmp_path):
    file = tmp_path / "ncu.csv"
    file.write_text(text)
    gemm, commit = read_ncu_csv(file)
    assert (gemm.name, gemm.dram_bytes, gemm.l2_bytes) == ("gemm", 1_235_000_000, 2_000_000_000)
    assert (commit.name, commit.launches, commit.dram_bytes, commit.l2_bytes) == ("commit_rows", 1, 640, 1500)
    assert gemm.launches == (2 if text is LONG else 1)
    table = ncu_markdown([gemm, commit], top=1)
    assert "1235.000" in table and "all kernels" in table and "commit_rows" not in table


def test_the_ncu_command(tmp_path, capsys):
    file = tmp_path / "ncu.csv"
    file.write_text(LONG)
    assert cli.run(["ncu-report", str(file)], {}) == 0
    assert "commit_rows" in capsys.readouterr().out
    assert cli.run(["ncu-report", str(tmp_path / "none.csv")], {}) == 2
    assert "is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing\n", 'no line that begins with "ID"'),
        (LONG.replace(L2_WRITES, "other"), f"lacks {L2_WRITES}; accepted: exports with --metrics"),
        (LONG.replace("Kbyte", "Tbyte"), "unit 'Tbyte'"),
    ],
)
def test_ncu_exports_that_say_something_else(text, message, tmp_path):
    file = tmp_path / "ncu.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_ncu_csv(file)
