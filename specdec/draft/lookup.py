"""What the drafters that look things up in the text have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from specdec.errors import ConfigError


class TextIndex(ABC):
    """A growing text that can be asked where its last tokens stood before."""

    text: list[int]

    @abstractmethod
    def append(self, token: int) -> None:
        """Add one token to the text."""

    @abstractmethod
    def copy(self) -> Self:
        """An equal index that grows on its own."""


def catch_up(index: TextIndex, tokens: Sequence[int]) -> None:
    """Append what `tokens` holds beyond the indexed text, which it must continue; costs only the new tokens."""
    known = len(index.text)
    if len(tokens) < known:
        raise ConfigError(f"row of {len(tokens)} tokens after {known}; accepted: rows that only grow until `end`")
    for token in tokens[known:]:
        index.append(token)
