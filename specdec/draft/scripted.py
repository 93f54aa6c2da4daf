"""Drafters for tests and for measuring the system: they are told what the target will say."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from random import Random
from typing import final

from jaxtyping import Float
from torch import Tensor

from specdec.config import require_int, require_number
from specdec.draft.base import DraftContext, Drafter
from specdec.draft.tree import Nodes
from specdec.errors import ConfigError
from specdec.types import MAX_WINDOW, Draft, Verdict, Window


class TellingDrafter(Drafter):
    """Proposes from given continuations, rightly or wrongly; never looks at the text.

    Token `t` of `continuations[row]` is meant for the row's generated index `t`; behind their end nothing is drafted.
    """

    def __init__(
        self, continuations: Sequence[Sequence[int]], vocab_size: int, depth: int = 4, siblings: int = 0
    ) -> None:
        """Args:
        continuations: tokens of each batch row from the first generated one on.
        depth: drafted tokens from the root down.
        siblings: wrong tokens put before each drafted token under the same parent; the draft is a tree then.
        """
        require_int("vocab_size", vocab_size, 2, None)
        require_int("depth", depth, 1, MAX_WINDOW - 1)
        require_int("siblings", siblings, 0, vocab_size - 2)
        for row, tokens in enumerate(continuations):
            for token in tokens:
                require_int(f"continuations[{row}]", token, 0, vocab_size - 1)
        self._continuations = [list(tokens) for tokens in continuations]
        self._vocab_size = vocab_size
        self._depth = depth
        self._siblings = siblings

    @abstractmethod
    def is_right(self, row: int, index: int, depth: int) -> bool:
        """Whether the token at `depth` of the draft for generated index `index` is the given one, or a wrong one."""

    @final
    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @final
    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        """Nothing to do."""

    @final
    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        """Nothing to do."""

    @final
    def propose(self, context: DraftContext) -> Draft:
        rows = zip(context.rows, context.num_generated, context.max_nodes, context.max_depths, strict=True)
        return Draft.trees([self._draft(*row) for row in rows], context.roots.device)

    @final
    def observe(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        """Nothing to learn."""

    @final
    def end(self) -> None:
        """Nothing to do."""

    def _draft(self, row: int, index: int, max_nodes: int, max_depth: int) -> Nodes:
        nodes: Nodes = []
        parent = 0
        depths = min(self._depth, max_depth, max_nodes // (self._siblings + 1))
        for depth, token in enumerate(self._continuations[row][index : index + depths], start=1):
            drafted = token if self.is_right(row, index, depth) else (token + 1) % self._vocab_size
            others = [(token + 2 + i) % self._vocab_size for i in range(self._siblings)]
            nodes += [(sibling, parent) for sibling in (*others, drafted)]
            parent = len(nodes)
        return nodes


@final
class ScriptedDrafter(TellingDrafter):
    """Right everywhere but at the depths it is told to spoil."""

    def __init__(
        self,
        continuations: Sequence[Sequence[int]],
        vocab_size: int,
        depth: int = 4,
        siblings: int = 0,
        wrong_depths: Sequence[int] = (),
    ) -> None:
        """Args:
        wrong_depths: depths, from 1, at which a wrong token stands; the others are as in `TellingDrafter`.
        """
        super().__init__(continuations, vocab_size, depth, siblings)
        for wrong in wrong_depths:
            require_int("wrong_depths", wrong, 1, None)
        self._wrong_depths = frozenset(wrong_depths)

    def is_right(self, row: int, index: int, depth: int) -> bool:
        return depth not in self._wrong_depths


@final
class AlwaysWrongDrafter(TellingDrafter):
    """Never right, so that nothing is ever accepted."""

    def is_right(self, row: int, index: int, depth: int) -> bool:
        return False


@final
class SyntheticDrafter(TellingDrafter):
    """Synthetic: right with a set probability, to measure the system; no drafter that anyone could have."""

    def __init__(
        self,
        continuations: Sequence[Sequence[int]],
        vocab_size: int,
        depth: int = 4,
        siblings: int = 0,
        *,
        acceptance: float | Sequence[float],
        seed: int = 0,
    ) -> None:
        """Args:
        acceptance: probability that a drafted token is right when those above it are; one for all depths, or one for
            each depth, the last for all deeper ones.
        seed: with batch row, generated index and depth, decides what is right.
        """
        super().__init__(continuations, vocab_size, depth, siblings)
        rates = [acceptance] if isinstance(acceptance, (int, float)) else list(acceptance)
        if not rates:
            raise ConfigError("acceptance=(); accepted: a number from 0 to 1, or one for each depth")
        for rate in rates:
            require_number("acceptance", rate, 0.0, 1.0)
        self._rates = rates
        self._seed = seed

    @property
    def label(self) -> str:
        """What reports must call it."""
        return f"synthetic(acceptance={self._rates}, depth={self._depth}, siblings={self._siblings}, seed={self._seed})"

    def is_right(self, row: int, index: int, depth: int) -> bool:
        rate = self._rates[min(depth, len(self._rates)) - 1]
        return Random(f"{self._seed} {row} {index} {depth}").random() < rate
