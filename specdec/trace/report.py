"""What a traced generation was made of, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specdec.stats import SpecStats

FORMAT = "specdec-trace/1"

KINDS = ("accepted", "bonus", "plain")
"""How a token came: drafted and accepted; picked behind accepted drafts; picked in a step without any."""


@dataclass(frozen=True)
class Candidate:
    """A token that might have stood at a place."""

    token: int
    label: str
    """The token in visible characters."""
    probability: float
    """By the target, given the text before it, after logits processors."""


@dataclass(frozen=True)
class EmittedToken:
    """One token of the text."""

    token: int
    text: str
    """What it adds to the text; empty where a character is not complete yet."""
    label: str
    kind: str
    depth: int
    """Depth in its step's tree; of a bonus or plain token, the depth that a draft of it would have had."""
    step: int
    probability: float
    top: tuple[Candidate, ...]
    """The most probable tokens at its place, best first."""
    rejected: tuple[Candidate, ...]
    """Drafts for its place that were not picked, in the order in which they were drafted."""


@dataclass(frozen=True)
class Node:
    """One drafted node; the root is no node here, so node `i` is window node `i + 1`."""

    token: int
    label: str
    parent: int
    """Window index of the parent."""
    depth: int
    accepted: bool
    probability: float | None
    """By the target, where the walk visited the parent."""


@dataclass(frozen=True)
class TracedStep:
    """One step, with the pages as it left them."""

    index: int
    root: str
    nodes: tuple[Node, ...]
    first_token: int
    """Index of the first token that it emitted."""
    num_tokens: int
    context_length: int
    """Committed tokens before the step."""
    pages: tuple[int, ...]
    """Pages that the row holds, reserved ones included."""
    rows_staged: int
    rows_committed: int
    bytes_written: int
    commit_path: str
    timings_ms: dict[str, float]
    notes: dict[str, str]


@dataclass(frozen=True)
class TraceReport:
    """A generation, token by token and step by step."""

    facts: dict[str, str]
    """Model, drafter, settings, versions: whatever says how it came about."""
    prompt: tuple[str, ...]
    """Text of each prompt token."""
    tokens: tuple[EmittedToken, ...]
    steps: tuple[TracedStep, ...]
    page_size: int
    stats: SpecStats

    @property
    def counts(self) -> dict[str, int]:
        """Tokens of each kind."""
        return {kind: sum(token.kind == kind for token in self.tokens) for kind in KINDS}

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(token.text for token in self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "format": FORMAT,
            "facts": self.facts,
            "prompt": list(self.prompt),
            "tokens": [asdict(token) for token in self.tokens],
            "steps": [asdict(step) for step in self.steps],
            "page_size": self.page_size,
            "stats": self.stats.to_dict(),
        }
