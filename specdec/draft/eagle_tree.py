"""Dynamic draft trees (EAGLE-2, Li et al. 2024, arXiv:2406.16858, section 4), as tensors over a batch.

Expand the best `width` children of the root; at each further level run the best `width` nodes, take `width` children
of each, and go on with the best of those by cumulative log-probability.  In the end the best nodes of all levels make
the draft.  A chain is the tree of width 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.types import Draft


@dataclass(frozen=True)
class Frontier:
    """The nodes of one level that are run next."""

    tokens: Int[Tensor, "b k"]
    parents: Int[Tensor, "b k"]
    """Which node of the frontier before each one hangs on."""
    scores: Float[Tensor, "b k"]
    """Cumulative log-probabilities, best first."""
    places: Int[Tensor, "b k"]
    """Places in the pool."""


class CandidatePool:
    """Every candidate of a tree that grows level by level; the root has no place in it (-1)."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        root = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self.frontier = Frontier(root, root, root.float(), root - 1)
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._level_sizes: list[int] = []

    def grow(self, log_probs: Float[Tensor, "b f k"], tokens: Int[Tensor, "b f k"]) -> Frontier:
        """Add `k` children under each of the frontier's `f` nodes; the best `k` of them are the next frontier.

        Candidates that cannot be (log-probability NaN or -inf) stay in the pool and are never drafted.
        """
        width = tokens.shape[2]
        impossible = float("-inf")
        log_probs = log_probs.float().nan_to_num(nan=impossible, posinf=impossible, neginf=impossible)
        scores = (self.frontier.scores[..., None] + log_probs).flatten(1)
        size = sum(self._level_sizes)
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores)
        self._parents.append(self.frontier.places.repeat_interleave(width, dim=1))
        self._level_sizes.append(scores.shape[1])
        best = scores.topk(width, dim=1)
        self.frontier = Frontier(
            tokens=self._tokens[-1].gather(1, best.indices),
            parents=best.indices // width,
            scores=best.values,
            places=best.indices + size,
        )
        return self.frontier

    def is_settled(self, num_nodes: int, min_score: float = float("-inf")) -> bool:
        """Whether no deeper node can be among the best, since no child scores above its parent; synchronises."""
        best = self.frontier.scores[:, 0]
        if sum(self._level_sizes) < num_nodes:
            return bool((best < min_score).all())
        worst_kept = torch.cat(self._scores, dim=1).topk(num_nodes, dim=1).values[:, -1]
        return bool((best <= worst_kept.clamp(min=min_score)).all())

    def select(self, max_nodes: Sequence[int], max_depths: Sequence[int], min_score: float = float("-inf")) -> Draft:
        """The best nodes of each row, at most so many, none deeper and none scoring less than told; synchronises."""
        scores, device = torch.cat(self._scores, dim=1), self._scores[0].device
        depths = torch.arange(1, len(self._level_sizes) + 1, device=device)
        depths = depths.repeat_interleave(torch.tensor(self._level_sizes, device=device))
        limits = torch.tensor([max_nodes, max_depths], device=device)
        scores = scores.masked_fill((depths > limits[1, :, None]) | (scores < min_score), float("-inf"))
        # Stable, so that of equal scores the earlier place wins: a parent is never left out for its child.
        order = scores.argsort(dim=1, descending=True, stable=True)
        return self._draft(order, torch.minimum((scores > float("-inf")).sum(1), limits[0]))

    def _draft(self, order: Int[Tensor, "b p"], lengths: Int[Tensor, " b"]) -> Draft:
        """The first candidates of an order, best first: parents, which score no less, come before their children."""
        width = int(lengths.max())
        places = order[:, :width]
        ranks = torch.empty_like(order)
        ranks.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
        behind = torch.arange(width, device=places.device) >= lengths[:, None]
        tokens = torch.cat(self._tokens, dim=1).gather(1, places)
        above = torch.cat(self._parents, dim=1).gather(1, places)
        parents = (ranks.gather(1, above.clamp(min=0)) + 1).masked_fill(above < 0, 0)
        return Draft(tokens.masked_fill(behind, 0), parents.masked_fill(behind, 0), lengths)


def reference_tree(
    log_probs_behind: Callable[[tuple[int, ...]], Sequence[float]], width: int, depth: int, num_nodes: int
) -> list[tuple[int, ...]]:
    """The same tree in plain Python: the paths of its nodes, best first.

    `log_probs_behind(path)` gives the draft's log-probability of every token behind a path of tokens.
    """
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        level: list[tuple[int, ...]] = []
        for path in frontier:
            behind = log_probs_behind(path)
            for token in sorted(range(len(behind)), key=lambda token: -behind[token])[:width]:
                scores[(*path, token)] = scores[path] + behind[token]
                level.append((*path, token))
        frontier = sorted(level, key=lambda path: -scores[path])[:width]
    candidates = [path for path in scores if path]
    return sorted(candidates, key=lambda path: -scores[path])[:num_nodes]
