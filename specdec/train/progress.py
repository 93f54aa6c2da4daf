"""What the pipeline tells the outside while it works."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import final


class Progress(ABC):
    """Sees phases begin and advance; how that is shown is its own affair."""

    @abstractmethod
    def phase(self, name: str, total: int, done: int = 0) -> None:
        """A phase of `total` units begins, `done` of them finished before."""

    @abstractmethod
    def advance(self, done: int, note: str = "") -> None:
        """So many units of the phase are done."""

    @abstractmethod
    def say(self, text: str) -> None:
        """One line worth keeping."""


@final
class Lines(Progress):
    """Plain lines, at most one every `every` seconds: for logs and pipes."""

    def __init__(self, every: float = 5.0) -> None:
        self._every, self._last, self._start = every, 0.0, time.monotonic()
        self._name, self._total = "", 0

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self._name, self._total, self._last = name, total, 0.0
        self.say(f"{name}: {done} of {total}")

    def advance(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if done >= self._total or now - self._last >= self._every:
            self._last = now
            self.say(f"{self._name}: {done} of {self._total} {note}")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:7.1f} s] {text}", flush=True)


@final
class Silent(Progress):
    """Says nothing: for tests, and for all but the first of several processes."""

    def phase(self, name: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, done: int, note: str = "") -> None:
        pass

    def say(self, text: str) -> None:
        pass
