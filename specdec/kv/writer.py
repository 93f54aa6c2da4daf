"""`KVWriter`: when, and which, K/V rows of a window reach the pages."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from specdec.types import CommitStats, KVView, Verdict, Window


class KVStage(ABC):
    """What a forward needs of a writer: somewhere to put each layer's rows."""

    @abstractmethod
    def stage(self, layer: int, k: Float[Tensor, "b w h dk"], v: Float[Tensor, "b w h dv"]) -> KVView:
        """Take the K/V rows of one layer and return what attention of that layer reads."""


class KVWriter(KVStage):
    """Owns what attention sees of a window, and what of it becomes pages.

    Life of a window: `begin` → `stage` once per layer → `commit` or `abort`.  Anything else raises `WindowError`.
    Every writer gives attention bit-identical views of the same window.
    """

    @abstractmethod
    def begin(self, window: Window) -> None:
        """Open a window; reserves the slots that its commit needs, raising `OutOfPages` before anything changed."""

    @abstractmethod
    def commit(self, verdict: Verdict) -> CommitStats:
        """Make the kept rows of all layers, or of none, pages `L .. L + num_kept - 1`, and advance the lengths."""

    @abstractmethod
    def abort(self) -> None:
        """Close the window as if it had never been opened; without an open window nothing happens."""
