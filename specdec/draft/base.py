"""`Drafter`: where the proposals come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from specdec.sampling import Noise
from specdec.types import Draft, Verdict, Window


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may know when it proposes; all lists are views of live state and must not be changed."""

    rows: tuple[int, ...]
    """Batch rows that still generate; the draft has one row for each, in this order."""
    tokens: tuple[Sequence[int], ...]
    """Prompt and emitted tokens of each of those rows, without padding; the last one is the root."""
    roots: Int[Tensor, " b"]
    max_nodes: tuple[int, ...]
    """Most nodes to draft for each row; 0 asks for an empty row."""
    max_depths: tuple[int, ...]
    """Deepest useful node for each row: tokens left to emit, less the one that the step gives anyway."""
    num_generated: tuple[int, ...]
    """Tokens each row has emitted so far = index of the next one (the key of its noise)."""
    temperature: float = 1.0
    """What the target divides its scores by before it picks; a drafter that picks with the noise divides its own."""
    noise: Noise | None = None
    """The target's noise when sampling, None when greedy; a drafter that picks with it agrees with the target more
    often."""


class Drafter(ABC):
    """Proposes tokens; any proposal is safe, good ones are fast.

    Life: `begin` → `observe` of the prefill windows → (`propose` → `observe`)* → `end`.  `end` may come at any time,
    also after an
    exception, and leaves the drafter ready for the next `begin`.
    """

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """Target features that `observe` needs: `i` is the residual stream entering layer `i`, -1 the last hidden state
        after the final norm (what `lm_head` reads); empty for drafters that look at tokens only."""

    @abstractmethod
    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> Sequence[int] | None:
        """Get ready for a batch: one unpadded prompt per batch row; no row grows beyond `max_length` tokens.

        Returns how many of each prompt's first tokens need not be observed, because the drafter has kept what it needs
        of them; None: as many as one likes where it has no taps, and none where it has.
        """

    @abstractmethod
    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        """Batch rows `copies` have the same prompt as `source`, whose prefill was just observed: take its state
        over."""

    @abstractmethod
    def propose(self, context: DraftContext) -> Draft:
        """Draft at most `max_nodes` tokens for each row, no node deeper than `max_depths`."""

    @abstractmethod
    def observe(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        """Learn what became of a window (prefill windows, kept whole, included); `features` follow the order of
        `taps`."""

    @abstractmethod
    def end(self) -> None:
        """Let go of everything held for the batch."""
