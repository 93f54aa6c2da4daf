"""`specdec bench` from the command line to its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from specdec.bench.command import bench_command
from specdec.errors import ConfigError
from tests.models import byte_tokenizer, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(path)
    tiny_llama(vocab_size=257, max_position_embeddings=1024).save_pretrained(path)
    return str(path)


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    lines = [{"question_id": i, "category": "odd" if i % 2 else "even", "turns": [f"Count to {i}."]} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def bench(*options: str):
    app = typer.Typer()
    app.command()(bench_command)
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(app, ["--device", "cpu", *options])
    finally:
        torch.set_num_threads(threads)


def test_writes_both_reports_and_prints_the_page(folder: str, questions: str, tmp_path: Path) -> None:
    output = tmp_path / "out"
    sizes = ["--max-new-tokens", "12", "--limit", "3", "--threads", "1", "--copy-task", "1"]
    drafters = ["--drafter", "suffix", "--drafter", "ngram", "--drafter", "none", "--hf-lookup", "3"]
    result = bench("--model", folder, "--prompts", questions, "--output", str(output), *sizes, *drafters)
    assert result.exit_code == 0, result.output
    data = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert list(data["groups"]) == ["overall", "even", "odd", "copying"]
    assert list(data["groups"]["odd"]) == ["hf", "none", "suffix", "ngram", "hf lookup 3"]
    assert data["groups"]["overall"]["suffix"]["turns"] == 4
    assert data["groups"]["overall"]["suffix"]["identical_turns"] == 4
    assert data["machine"]["threads"] == 1
    assert data["config"]["max_new_tokens"] == 12
    page = (output / "report.md").read_text(encoding="utf-8")
    assert page in result.stdout


def test_hf_assistant_is_measured_too(folder: str, questions: str) -> None:
    result = bench(
        "--model", folder, "--prompts", questions, "--limit", "1", "--max-new-tokens", "6", "--hf-assistant", folder
    )
    assert result.exit_code == 0, result.output
    assert f"hf assisted {Path(folder).name}" in result.stdout


def test_something_must_be_measured(folder: str) -> None:
    result = bench("--model", folder)
    assert isinstance(result.exception, ConfigError)
    assert "--prompts" in str(result.exception)


def test_wrong_tokens_give_exit_status_1(folder: str, questions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import specdec.bench.measure as measuring

    monkeypatch.setattr(measuring, "first_difference", lambda tokens, reference: 3)
    result = bench("--model", folder, "--prompts", questions, "--limit", "1", "--max-new-tokens", "6")
    assert result.exit_code == 1
    assert "withheld" in result.stdout
