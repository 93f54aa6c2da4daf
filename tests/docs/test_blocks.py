"""Every Python block and every `specdec` command of the site runs, page by page and in order.

On the tiny model they must run, and their assertions hold.  On the real model (marked slow) what Python blocks print
must be what the page shows behind them (`title="Output"`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import run
from tests.docs.blocks import Block, blocks_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    DOCS / "index.md",
    *(page for part in ("tutorials", "how-to", "reference") for page in DOCS.glob(f"{part}/*.md")),
]
RUNNING = sorted(page for page in PAGES if any(block.language in ("python", "sh") for block in blocks_of(page)))
WITH_OUTPUT = [page for page in RUNNING if any(block.title == "Output" for block in blocks_of(page))]

NOT_OURS = ("pip ", "pytest", "git ", "cd ", "#", "mkdocs ")
"""Beginnings of shell lines that are not run."""

BY_HAND = ("how-to/count-page-writes.md",)
"""Pages whose `bash` blocks need a GPU, its counters and the rights to read them."""

SHORTENED = {
    "generate": ["--max-new-tokens", "8"],
    "trace": ["--max-new-tokens", "8"],
    "bench": ["--max-new-tokens", "4"],
    "eval": ["--max-new-tokens", "4", "--no-time"],
}
"""Commands that take `--model`, and what keeps them short."""


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


def execute(
    page: Path, capsys: pytest.CaptureFixture[str], run_shell: Callable[[Block], None]
) -> list[tuple[Block, str]]:
    """Run a page's blocks, Python in one namespace; of each block whose output the page shows, what it printed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    printed = ""
    for block in blocks_of(page):
        if block.language == "python":
            capsys.readouterr()
            # Empty lines in front, so that a traceback names the line of the page.
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
            printed = capsys.readouterr().out
        elif block.language == "sh":
            run_shell(block)
        elif block.title == "Output":
            shown.append((block, printed))
    return shown


def test_there_are_pages() -> None:
    assert len(RUNNING) > 10 and len(WITH_OUTPUT) > 5


def test_every_language_is_known() -> None:
    """A block in a language that no test looks at would never be run."""
    known = {"", "python", "sh", "text", "json", "html", "toml"}
    blocks = [block for page in PAGES for block in blocks_of(page)]
    unknown = [block for block in blocks if block.language not in known and name_of(block.page) not in BY_HAND]
    assert not [f"{name_of(block.page)}:{block.line}" for block in unknown]


@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_blocks_run_on_a_tiny_model(page, load_tiny, tiny_folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)

    def run_shell(block: Block) -> None:
        for line in block.code.replace("\\\n", " ").splitlines():
            if not line.strip() or line.startswith(NOT_OURS):
                continue
            program, *arguments = shlex.split(line, comments=True)
            assert program == "specdec", f"{name_of(page)}:{block.line}: no test runs {program!r}"
            status = run(on_tiny_model(arguments, tiny_folder), {**os.environ})
            assert status == 0, (line, capsys.readouterr().err)

    execute(page, capsys, run_shell)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_OUTPUT, ids=name_of)
def test_blocks_print_what_the_page_shows(page, smollm2, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("specdec.hf.models.load_model", lambda *args, **options: smollm2)
    monkeypatch.chdir(tmp_path)
    for block, printed in execute(page, capsys, run_shell=lambda block: None):
        assert printed == block.code, f"{name_of(page)}:{block.line}"


def on_tiny_model(arguments: list[str], folder: Path) -> list[str]:
    """The same command for a tiny model, kept short."""
    command = arguments[0]
    if command == "info":
        return ["info", str(folder), *[argument for argument in arguments[1:] if argument.startswith("-")]]
    if command == "train":
        return [*arguments, "--tiny", "--device", "cpu"]
    if command not in SHORTENED:
        return arguments
    if "--model" in arguments:
        place = arguments.index("--model")
        arguments = arguments[:place] + arguments[place + 2 :]
    return [*arguments, "--model", str(folder), *SHORTENED[command]]
