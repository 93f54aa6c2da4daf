"""Prompt lookup: draft what followed the last tokens when they stood in the text before.

(Saxena 2023, "Prompt Lookup Decoding"; here with several matches as branches of one tree.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxtyping import Float
from torch import Tensor

from specdec.config import build_config, require_int
from specdec.draft.base import DraftContext, Drafter
from specdec.draft.lookup import TextIndex, catch_up
from specdec.draft.tree import Continuation, Nodes, grow_tree
from specdec.types import MAX_WINDOW, Draft, Verdict, Window


@dataclass(frozen=True)
class NGramConfig:
    """How far prompt lookup looks, and how much it drafts."""

    min_size: int = 1
    """Fewest last tokens that must have stood in the text before."""
    max_size: int = 4
    """Most last tokens that are looked up; longer matches come first."""
    num_drafts: int = 10
    """Most nodes of a draft; a single match is drafted that deep."""
    max_branches: int = 4
    """Most matches that join the tree: longer ones first, later ones first among equals."""

    def __post_init__(self) -> None:
        require_int("min_size", self.min_size, 1, None)
        require_int("max_size", self.max_size, self.min_size, None)
        require_int("num_drafts", self.num_drafts, 1, MAX_WINDOW - 1)
        require_int("max_branches", self.max_branches, 1, None)


@final
class NGramIndex(TextIndex):
    """A growing text and, for every n-gram of it, the places that followed.

    Appending costs O(max_size) and so does a look-up, however long the text is.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        self._sizes = range(min_size, max_size + 1)
        self._places: dict[tuple[int, ...], list[int]] = {}
        self.text: list[int] = []

    def append(self, token: int) -> None:
        self.text.append(token)
        length = len(self.text)
        recent = tuple(self.text[-self._sizes[-1] :])
        for size in self._sizes:
            if size <= length:
                self._places.setdefault(recent[-size:], []).append(length)

    def matches(self, limit: int) -> list[tuple[int, int]]:
        """`(place, size)` of at most `limit` places that follow an earlier n-gram equal to the last `size` tokens.

        Longest n-grams first, latest places first among equals, every place once, with its longest n-gram.
        """
        found: dict[int, int] = {}
        recent = tuple(self.text[-self._sizes[-1] :])
        for size in reversed(self._sizes):
            if size > len(self.text):
                continue
            places = self._places[recent[-size:]]
            # The last place is the end of the text itself.  Of the `limit` latest, at most `len(found)` are known.
            for place in places[-2 : -2 - limit : -1]:
                if len(found) == limit:
                    return list(found.items())
                found.setdefault(place, size)
        return list(found.items())

    def copy(self) -> NGramIndex:
        twin = NGramIndex(self._sizes[0], self._sizes[-1])
        twin.text = list(self.text)
        twin._places = {ngram: list(places) for ngram, places in self._places.items()}
        return twin


@final
class NGramDrafter(Drafter):
    """Looks the last tokens up in the row's own text and drafts what followed them; needs no weights."""

    def __init__(self, config: NGramConfig | None = None) -> None:
        self.config = config or NGramConfig()
        self._prompts: tuple[Sequence[int], ...] = ()
        self._rows: list[NGramIndex] = []

    @staticmethod
    def of(**options: Any) -> NGramDrafter:
        """Build from the options of `NGramConfig`; unknown names raise `ConfigError`."""
        return NGramDrafter(build_config(NGramConfig, options))

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        self._prompts = prompts
        self._rows = [NGramIndex(self.config.min_size, self.config.max_size) for _ in prompts]

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        catch_up(self._rows[source], self._prompts[source])
        for row in copies:
            self._rows[row] = self._rows[source].copy()

    def propose(self, context: DraftContext) -> Draft:
        rows = zip(context.rows, context.tokens, context.max_nodes, context.max_depths, strict=True)
        trees = [self._draft(self._rows[row], tokens, nodes, depth) for row, tokens, nodes, depth in rows]
        return Draft.trees(trees, context.roots.device)

    def observe(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        """Nothing to learn: the next context holds the emitted tokens."""

    def end(self) -> None:
        self._prompts = ()
        self._rows = []

    def _draft(self, index: NGramIndex, tokens: Sequence[int], max_nodes: int, max_depth: int) -> Nodes:
        catch_up(index, tokens)
        if max_nodes < 1 or max_depth < 1:
            return []
        matches = index.matches(self.config.max_branches)
        continuations = [Continuation(index.text, place, size) for place, size in matches]
        return grow_tree(continuations, min(max_nodes, self.config.num_drafts), max_depth)
