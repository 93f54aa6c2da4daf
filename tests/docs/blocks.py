"""The fenced code blocks of a Markdown page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)(?P<rest>.*)$")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    """Line of the page, from 1, on which the code starts."""
    language: str
    title: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order, without their indentation."""
    blocks = []
    opened: re.Match[str] | None = None
    code: list[str] = []
    start = 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None:
            if fence is not None:
                opened, code, start = fence, [], number + 1
        elif line.strip() == "```":
            title = re.search(r'title="([^"]*)"', opened["rest"])
            blocks.append(Block(page, start, opened["language"], title[1] if title else "", "\n".join(code) + "\n"))
            opened = None
        else:
            code.append(line.removeprefix(opened["indent"]))
    if opened is not None:
        raise ValueError(f"{page}: the block before line {start} is not closed")
    return blocks
