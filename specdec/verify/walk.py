"""The walk down all windows at once: from a pick for every node to the kept path, without a loop over rows or depths.

Everything but `settle` reads no tensor on the host, so that it can be captured as it stands.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.errors import NonFiniteLogits
from specdec.sampling import NO_PICK, Sampler, pick_or_flag
from specdec.types import Verdict, Window


def decide(
    scores: Float[Tensor, "b w v"],
    noise: Float[Tensor, "b w v"] | None,
    tokens: Int[Tensor, "b w"],
    parents: Int[Tensor, "b w"],
    num_nodes: Int[Tensor, " b"],
    is_chain: bool,
) -> Int[Tensor, "b 2*w+1"]:
    """Pick at every node and walk; of each row: `num_kept`, the path padded with -1, the token emitted behind each of
    its nodes (-1 where there was nothing to pick from)."""
    picks = pick_or_flag(scores, noise)
    kept = kept_nodes(tokens, parents, num_nodes, picks, is_chain)
    path = path_of(kept)
    emitted = picks.gather(1, path.clamp(min=0))
    return torch.cat([kept.sum(1, keepdim=True), path, emitted], dim=1)


def kept_nodes(
    tokens: Int[Tensor, "b w"],
    parents: Int[Tensor, "b w"],
    num_nodes: Int[Tensor, " b"],
    picks: Int[Tensor, "b w"],
    is_chain: bool,
) -> Bool[Tensor, "b w"]:
    """Nodes that bear the token picked at their parent, all the way up; one path per row, siblings being distinct."""
    width = tokens.shape[1]
    steps = torch.arange(width, device=tokens.device)
    kept = (tokens == picks.gather(1, parents)) & (steps < num_nodes[:, None]) | (steps == 0)
    if is_chain:
        return kept.cumprod(1).bool()
    # Pointer doubling: after round r a node knows about its 2^r nearest ancestors.
    above = parents
    for _ in range((width - 1).bit_length()):
        kept = kept & kept.gather(1, above)
        above = above.gather(1, above)
    return kept


def path_of(kept: Bool[Tensor, "b w"]) -> Int[Tensor, "b w"]:
    """The kept nodes of each row from the root downwards, padded with -1; parents stand before children."""
    rows, width = kept.shape
    nodes = torch.arange(width, device=kept.device).expand(rows, -1)
    places = (kept.cumsum(1) - 1).masked_fill(~kept, width)
    return nodes.new_full((rows, width + 1), -1).scatter(1, places, nodes)[:, :width]


def scores_at_nodes(logits: Float[Tensor, "b w v"], sampler: Sampler) -> Float[Tensor, "b w v"]:
    """Processed scores of every node; only for samplers whose processors look at scores alone."""
    if not sampler.processors:
        # An argmax is the same in any float type; sampling is not.
        return logits if sampler.greedy else logits.float()
    scores = logits.flatten(0, 1).to(torch.float32, copy=True)
    return sampler.process_nodes(scores).unflatten(0, logits.shape[:2])


def noise_at_nodes(window: Window, sampler: Sampler) -> Float[Tensor, "b w v"] | None:
    """The noise of each node's generated index and row; None when greedy."""
    if sampler.noise is None:
        return None
    noise, deepest = sampler.noise, max(window.deepest)
    by_depth = torch.stack(
        [
            torch.stack([noise.at(sampler.num_generated(row) + depth)[row] for depth in range(deepest + 1)])
            for row in window.rows
        ]
    ).to(window.tokens.device)
    rows = torch.arange(len(window.rows), device=window.tokens.device)[:, None]
    return by_depth[rows, window.depths.clamp(max=deepest)]


def settle(
    decision: Int[Tensor, "b 2*w+1"],
    window: Window,
    sampler: Sampler,
    logits: Float[Tensor, "b w v"],
    scores: Float[Tensor, "b w v"],
) -> Verdict:
    """Hand the emitted tokens to the sampler one at a time, as plain decoding would, and cut each row at its first
    stop; synchronises.  Raises `NonFiniteLogits` where a visited node had nothing to pick from."""
    width = window.width
    host = decision.tolist()
    kept = [row[0] for row in host]
    ended = [False] * len(kept)
    is_cut = False
    walking = list(range(len(kept)))
    depth = 0
    while walking:
        batch_rows = [window.rows[i] for i in walking]
        tokens = [host[i][1 + width + depth] for i in walking]
        if min(tokens) < 0:
            raise NonFiniteLogits(NO_PICK)
        if sampler.keeps_records:
            nodes = [host[i][1 + depth] for i in walking]
            sampler.record(batch_rows, scores[walking, nodes].float(), logits[walking, nodes].float())
        stops = sampler.push(batch_rows, tokens)
        depth += 1
        for i, stop in zip(walking, stops, strict=True):
            ended[i] = stop
        below = [i for i, stop in zip(walking, stops, strict=True) if not stop and depth < kept[i]]
        # In lockstep nobody goes on alone: the batch would no longer be at one index.
        if sampler.lockstep and len(below) < len(walking):
            below = []
        for i in set(walking) - set(below):
            is_cut = is_cut or depth < kept[i]
            kept[i] = depth
        walking = below
    longest = max(kept)
    path = decision[:, 1 : 1 + longest]
    num_kept = decision[:, 0]
    if is_cut:
        num_kept = torch.tensor(kept, device=decision.device)
        path = path.masked_fill(torch.arange(longest, device=path.device) >= num_kept[:, None], -1)
    next_tokens = decision[:, 1 + width :].gather(1, num_kept[:, None] - 1).squeeze(1)
    return Verdict(path, num_kept, next_tokens, torch.tensor(ended, device=decision.device))
