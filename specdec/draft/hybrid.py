"""Two drafters, one tree: the nodes of the second join those of the first under one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from jaxtyping import Float
from torch import Tensor

from specdec.config import require_int
from specdec.draft.base import DraftContext, Drafter
from specdec.draft.tree import Nodes, merge_trees
from specdec.errors import ConfigError
from specdec.types import MAX_WINDOW, Draft, Verdict, Window


@final
class HybridDrafter(Drafter):
    """Lets the secondary drafter speak first, within its share, and gives the primary the rest of each row's budget.

    Meant for a secondary that knows when it knows something, as `SuffixDrafter` does: where it is silent the primary
    has the whole budget.  Paths that both propose are drafted once.
    """

    def __init__(self, primary: Drafter, secondary: Drafter, secondary_nodes: int = 16) -> None:
        """Args:
        secondary_nodes: most nodes of a row that the secondary may take, and never more than half of the row's budget.
        """
        require_int("secondary_nodes", secondary_nodes, 1, MAX_WINDOW - 1)
        self.primary = primary
        self.secondary = secondary
        self.secondary_nodes = secondary_nodes

    @property
    def taps(self) -> tuple[int, ...]:
        return self.primary.taps + self.secondary.taps

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> Sequence[int] | None:
        ready = [drafter.begin(prompts, max_length) for drafter in (self.primary, self.secondary) if drafter.taps]
        for drafter in (self.primary, self.secondary):
            if not drafter.taps:
                drafter.begin(prompts, max_length)
        known = [counts for counts in ready if counts is not None]
        return [min(counts) for counts in zip(*known, strict=True)] if known and len(known) == len(ready) else None

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        self.primary.fork(source, copies)
        self.secondary.fork(source, copies)

    def propose(self, context: DraftContext) -> Draft:
        """The merged tree of both; synchronises."""
        share = tuple(min(self.secondary_nodes, nodes // 2) for nodes in context.max_nodes)
        second = nodes_of(self.secondary.propose(replace(context, max_nodes=share)))
        rest = tuple(nodes - len(row) for nodes, row in zip(context.max_nodes, second, strict=True))
        first = nodes_of(self.primary.propose(replace(context, max_nodes=rest)))
        merged = [merge_trees(both, MAX_WINDOW - 1) for both in zip(first, second, strict=True)]
        return Draft.trees(merged, context.roots.device)

    def observe(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        num_primary = len(self.primary.taps)
        self.primary.observe(window, features[:num_primary], verdict)
        self.secondary.observe(window, features[num_primary:], verdict)

    def end(self) -> None:
        """End both, the secondary even where ending the primary fails."""
        try:
            self.primary.end()
        finally:
            self.secondary.end()


def nodes_of(draft: Draft) -> list[Nodes]:
    """The nodes of each row, without padding; synchronises.  Raises `ConfigError` for drafts that were sampled."""
    if draft.probs is not None:
        raise ConfigError("HybridDrafter: a draft has `probs`; accepted: drafts that are a function of the past")
    rows = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.lengths.tolist(), strict=True)
    return [list(zip(tokens[:length], parents[:length], strict=True)) for tokens, parents, length in rows]
