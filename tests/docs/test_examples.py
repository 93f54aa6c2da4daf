"""Every example runs, on a tiny model, and does what it says."""

from __future__ import annotations

import ast
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tiny_folder, monkeypatch, capsys, tmp_path):
    """Run an example as a program; returns what it printed."""

    def run(name: str, *arguments: str, answers: str = "", model: bool = True) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments, *(["--model", str(tiny_folder)] if model else [])])
        monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        try:
            runpy.run_path(str(FOLDER / name), run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
        return capsys.readouterr().out

    return run


def figures(text: str) -> tuple[int, int]:
    """Tokens and forwards of the line that examples end with."""
    found = re.search(r"(\d+) tokens in (\d+) forwards", text)
    assert found, text
    return int(found[1]), int(found[2])


def test_quickstart(run):
    printed = run("quickstart.py", "Hello", "--max-new-tokens", "8")
    assert figures(printed)[0] == 8
    assert "gives the same tokens" in printed


def test_drop_in_gives_the_text_of_the_plain_script(run):
    plain = run("drop_in.py", "--plain", "--max-new-tokens", "12")
    assert run("drop_in.py", "--max-new-tokens", "12") == plain
    assert len(plain) > 12


def test_streaming_chat_answers_every_line(run):
    assert run("streaming_chat.py", "--max-new-tokens", "6", answers="one\ntwo\n\nnever read\n").count("\n") >= 2


def test_custom_drafter(run):
    emitted, forwards = figures(run("custom_drafter.py", "--max-new-tokens", "24"))
    assert emitted == 24 and forwards <= 24


def test_custom_writer_shows_that_deferring_writes_less(run):
    printed = run("custom_writer.py", "--max-new-tokens", "24")
    rows = [[int(part.replace(",", "")) for part in re.findall(r"[\d,]*\d", line)] for line in printed.splitlines()]
    (_, staged, committed, deferred), (_, staged_too, committed_too, direct) = rows
    assert (staged, committed) == (staged_too, committed_too)
    assert deferred * staged <= direct * committed, "page bytes per committed row"


def test_structured_json(run):
    printed = run("structured_json.py")
    person = ast.literal_eval(printed.splitlines()[0])
    assert set(person) == {"name", "city", "age"} and isinstance(person["age"], int)


def test_batch_summaries(run, tmp_path):
    (tmp_path / "text.txt").write_text("Some text. Some more text. Some text.", encoding="utf-8")
    printed = run("batch_summaries.py", "text.txt", "text.txt", "--max-new-tokens", "8")
    assert "2 texts" in printed and printed.count("- ") >= 2


def test_head_training_leaves_a_head(run, tmp_path):
    printed = run("head_training.py", "--tokens", "1024", "--length", "64", "--rows", "16", "--epochs", "1")
    assert re.search(r"^trained head: τ \d", printed, re.MULTILINE)
    assert (tmp_path / "my-head" / "model.safetensors").is_file()


def test_every_example_has_a_test():
    tested = set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert {path.name for path in FOLDER.glob("*.py")} == tested
