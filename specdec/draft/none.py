"""No drafts at all: plain decoding through the same loop, the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from specdec.draft.base import DraftContext, Drafter
from specdec.types import Draft, Verdict, Window


@final
class NoDrafter(Drafter):
    """Proposes nothing; each step emits one token."""

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        pass

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        pass

    def propose(self, context: DraftContext) -> Draft:
        return Draft.empty(len(context.rows), context.roots.device)

    def observe(self, window: Window, features: tuple[Tensor, ...], verdict: Verdict) -> None:
        pass

    def end(self) -> None:
        pass
