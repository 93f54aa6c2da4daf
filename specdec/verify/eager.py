"""The readable reference of the acceptance law: one walk down the window, one pick per visited node."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.sampling import Sampler
from specdec.types import Verdict, Window
from specdec.verify.base import Verifier


@final
class EagerVerifier(Verifier):
    """Walks all rows down their trees at once; processors, noise and stopping criteria run at visited nodes only."""

    def verify(self, logits: Float[Tensor, "b w v"], window: Window, sampler: Sampler) -> Verdict:
        num_rows = len(window.rows)
        paths = [[0] for _ in range(num_rows)]
        next_tokens = [0] * num_rows
        ended = [False] * num_rows
        children = children_by_token(window)
        walking = list(range(num_rows))
        while walking:
            nodes = [paths[i][-1] for i in walking]
            picks, stops = sampler.choose([window.rows[i] for i in walking], logits[walking, nodes])
            below = []
            for i, node, token, stop in zip(walking, nodes, picks.tolist(), stops, strict=True):
                next_tokens[i], ended[i] = token, stop
                below.append(None if stop else children[i].get((node, token)))
            # In lockstep nobody goes on alone: the batch would no longer be at one index.
            if sampler.lockstep and None in below:
                break
            for i, child in zip(walking, below, strict=True):
                if child is not None:
                    paths[i].append(child)
            walking = [i for i, child in zip(walking, below, strict=True) if child is not None]
        return make_verdict(paths, next_tokens, ended, window)


def children_by_token(window: Window) -> list[dict[tuple[int, int], int]]:
    """For each row, `(parent node, token) → node`."""
    rows = zip(window.tokens.tolist(), window.parents.tolist(), window.num_nodes.tolist(), strict=True)
    return [{(parents[j], tokens[j]): j for j in range(1, count)} for tokens, parents, count in rows]


def make_verdict(paths: list[list[int]], next_tokens: list[int], ended: list[bool], window: Window) -> Verdict:
    """Put host-side paths, next tokens and stops on the window's device."""
    device = window.tokens.device
    longest = max(map(len, paths))
    return Verdict(
        path=torch.tensor([path + [-1] * (longest - len(path)) for path in paths], device=device),
        num_kept=torch.tensor([len(path) for path in paths], device=device),
        next_tokens=torch.tensor(next_tokens, device=device),
        stopped=torch.tensor(ended, device=device),
    )
