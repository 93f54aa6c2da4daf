"""The research scripts run in a shortened form, on a tiny model, and find what must be true of any model."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "research"


@pytest.fixture
def result_of(tiny_folder, monkeypatch, tmp_path):
    """Run a script on the tiny model and return the result that it wrote."""

    def result_of(name: str, *arguments: str) -> dict:
        output = tmp_path / "result.json"
        command = [name, "--model", str(tiny_folder), "--output", str(output), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        runpy.run_path(str(FOLDER / name / "run.py"), run_name="__main__")
        return json.loads(output.read_text(encoding="utf-8"))

    return result_of


def test_same_seed(result_of):
    short = ["--dtypes", "fp32", "--temperatures", "0,0.8", "--limit", "2", "--new-tokens", "10"]
    found = result_of("same_seed", "--ways", "none|suffix|suffix, vectorized", *short)["results"]
    ours = [line for line in found if not line["way"].startswith("hf prompt")]
    assert len(ours) == 8
    assert all(line["same"] == line["texts"] == 2 for line in ours)
    assert all(line["gaps"] == [] for line in ours)


def test_prefix_cache(result_of, tmp_path):
    questions = [{"question_id": i, "category": "chat", "turns": [f"Say {i}.", "Say it again."]} for i in range(2)]
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")
    found = result_of("prefix_cache", "--prompts", str(prompts), "--new-tokens", "20")
    assert found["equal"] == found["conversations"] == 2
    second = found["tokens"]["turn 2"]
    assert second["run_with"] < second["run_without"] == second["prompt_tokens"]


def test_finished_experiments_have_a_readme_and_a_result():
    for readme in FOLDER.glob("*/README.md"):
        assert (readme.parent / "run.py").is_file()
        assert list(readme.parent.glob("*.json")), readme.parent.name
