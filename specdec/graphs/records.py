"""What the host makes of a step's record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.kernels.step_state import HEADER
from specdec.sampling import Sampler


@dataclass(frozen=True)
class RowStep:
    """One row of a record."""

    num_kept: int
    next_token: int
    paused: bool
    """The device stopped the row: at a stop token, or at its limit."""
    tokens: list[int]
    """Window nodes, the root first."""
    parents: list[int]
    path: list[int]
    """Kept nodes."""

    @staticmethod
    def of(record: Sequence[int]) -> RowStep:
        """Read a row that `settle_step` wrote."""
        num_kept, next_token, stopped, num_nodes = record[:HEADER]
        width = (len(record) - HEADER) // 3
        tokens, parents, path = (list(record[HEADER + i * width :][:width]) for i in range(3))
        return RowStep(num_kept, next_token, bool(stopped), tokens[:num_nodes], parents[:num_nodes], path[:num_kept])

    @property
    def emitted(self) -> list[int]:
        """Tokens that the step emits: the kept drafts and the one behind them."""
        return [self.tokens[node] for node in self.path[1:]] + [self.next_token]


def push_in_order(sampler: Sampler, tokens: dict[int, list[int]]) -> dict[int, list[int]]:
    """Hand rows' tokens to the sampler one by one; returns those up to each row's end."""
    taken: dict[int, list[int]] = {row: [] for row in tokens}
    going = list(tokens)
    while going:
        following = [tokens[row][len(taken[row])] for row in going]
        ends = sampler.push(going, following)
        for row, token in zip(going, following, strict=True):
            taken[row].append(token)
        going = [row for row, end in zip(going, ends, strict=True) if not end and len(taken[row]) < len(tokens[row])]
    return taken
