"""τ without running the decoder: what a head would have had accepted along a text that the target wrote.

Verification keeps exactly the drafts that agree with the tokens that the target picks, greedily or with its noise, so
acceptance follows from the text alone: draft at a place, and count how far the text agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.draft.eagle_head import EagleHead
from specdec.train.chains import ChainMemory


@dataclass(frozen=True)
class Texts:
    """Texts of the target with its features."""

    tokens: Int[Tensor, "b t"]
    taps: tuple[Float[Tensor, "b t f"], ...]
    prompt_lengths: Int[Tensor, " b"]
    """At least 2: the last prompt token is the first root, and drafts need a pair behind it."""
    lengths: Int[Tensor, " b"]
    """Tokens of each row, prompt included; the columns behind are padding."""


@dataclass(frozen=True)
class Tau:
    """Emitted tokens per target forward, and how often each draft position was accepted."""

    tau: float
    """Over all texts together."""
    mean_of_texts: float
    steps: int
    texts: int
    reached: tuple[int, ...]
    """Steps in which each draft position was reached: all positions before it accepted, and the text not over."""
    passed: tuple[int, ...]
    """Steps in which it was accepted."""

    @property
    def by_position(self) -> tuple[float, ...]:
        """Acceptance of each draft position, given that all positions before it were accepted."""
        return tuple(p / r if r else 0.0 for p, r in zip(self.passed, self.reached, strict=True))


@torch.no_grad()
def chain_acceptance(head: EagleHead, texts: Texts, depth: int) -> Int[Tensor, "b t-1"]:
    """Drafts accepted, at most `depth`, of a greedy chain drafted behind each pair (feature `t`, token `t + 1`)."""
    pairs = texts.tokens.shape[1] - 1
    memory = ChainMemory(head.config.head_dim**-0.5, fast=False, window=head.config.sliding_window)
    hidden = head.fuse(tuple(tap[:, :-1] for tap in texts.taps))
    seen = texts.tokens[:, 1:]
    positions = torch.arange(pairs, device=seen.device)[None]
    alive = torch.ones_like(seen, dtype=torch.bool)
    accepted = torch.zeros_like(seen)
    for step in range(depth):
        hidden = head(head.embed(seen), hidden, positions + step, memory.attend)
        seen = _drafted(head, hidden)
        alive = alive & (seen == _ahead(texts, step + 2, pairs))
        accepted += alive
    return accepted


def _drafted(head: EagleHead, hidden: Float[Tensor, "b t d"]) -> Int[Tensor, "b t"]:
    """The head's argmax token at each place, a few rows of logits at a time."""
    rows = [head.logits(part).argmax(-1) for part in hidden.flatten(0, 1).split(4096)]
    return head.target_ids[torch.cat(rows)].view(hidden.shape[:2])


def _ahead(texts: Texts, offset: int, pairs: int) -> Int[Tensor, "b t"]:
    """The token `offset` places behind pair `t`, -1 where the text has ended."""
    index = torch.arange(pairs, device=texts.tokens.device)[None] + offset
    tokens = texts.tokens.gather(1, index.clamp(max=texts.tokens.shape[1] - 1).expand(len(texts.tokens), -1))
    return tokens.masked_fill(index >= texts.lengths[:, None], -1)


def tau_along(accepted: Int[Tensor, "b t"], texts: Texts, depth: int) -> Tau:
    """Walk along each text, step by step; the first root is the last prompt token, as in the decoder."""
    table = accepted.clamp(max=depth).tolist()
    emitted = steps = 0
    reached, passed = [0] * depth, [0] * depth
    means = []
    for row, (start, end) in enumerate(zip(texts.prompt_lengths.tolist(), texts.lengths.tolist(), strict=True)):
        root, row_steps = start - 1, 0
        while root < end - 1:
            count = min(table[row][root - 1], end - 2 - root)
            for position in range(min(depth, end - 2 - root)):
                reached[position] += position <= count
                passed[position] += position < count
            root += count + 1
            row_steps += 1
        if row_steps:
            means.append((end - start) / row_steps)
            emitted, steps = emitted + end - start, steps + row_steps
    mean = sum(means) / max(len(means), 1)
    return Tau(emitted / max(steps, 1), mean, steps, len(means), tuple(reached), tuple(passed))


@torch.no_grad()
def tree_acceptance(
    head: EagleHead, texts: Texts, depth: int, top_k: int, sizes: Sequence[int], at_once: int = 128
) -> dict[int, Int[Tensor, "b t-1"]]:
    """Drafts accepted behind each pair with EAGLE-2 trees of each of `sizes` nodes, the root included."""
    pairs = texts.tokens.shape[1] - 1
    embeddings = head.embed(texts.tokens[:, 1:])
    positions = torch.arange(pairs, device=texts.tokens.device)[None]
    inputs, residual = head.layer_inputs(embeddings, head.fuse(tuple(tap[:, :-1] for tap in texts.taps)))
    rotation = head.cos_sin(positions)
    keys, values = head.keys_values(inputs, rotation)
    memory = ChainMemory(head.config.head_dim**-0.5, fast=False, window=head.config.sliding_window)
    roots = head.finish(residual, memory.attend(head.queries(inputs, rotation), keys, values))
    result = {size: torch.zeros(texts.tokens.shape[0], pairs, dtype=torch.long) for size in sizes}
    for row, (start, end) in enumerate(zip(texts.prompt_lengths.tolist(), texts.lengths.tolist(), strict=True)):
        for first in range(start - 2, end - 2, at_once):
            chosen = torch.arange(first, min(first + at_once, end - 2), device=roots.device)
            trees = _Trees(head, keys[row, :end], values[row, :end], roots[row, chosen], chosen, top_k)
            future = [_future(texts.tokens[row], end, chosen + 2 + level) for level in range(depth)]
            for size, counts in trees.grow(future, depth, sizes).items():
                result[size][row, chosen.cpu()] = counts.cpu()
    return result


def _future(tokens: Int[Tensor, " t"], end: int, index: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    return torch.where(index < end, tokens[index.clamp(max=end - 1)], -1)


class _Trees:
    """One tree behind each of some pairs of one text, grown level by level, all trees together."""

    def __init__(
        self, head: EagleHead, keys: Tensor, values: Tensor, roots: Tensor, places: Tensor, top_k: int
    ) -> None:
        self._head, self._top_k, self._places = head, top_k, places
        groups = head.config.num_heads // head.config.num_kv_heads
        self._keys, self._values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))  # [t heads d]
        self._hidden = roots[:, None]  # [n 1 d]
        self._groups = groups

    def grow(self, future: list[Tensor], depth: int, sizes: Sequence[int]) -> dict[int, Tensor]:
        """Accepted drafts of each tree, for each size."""
        n, k = len(self._places), self._top_k
        scores, on_path = [], []
        beam_score = torch.zeros(n, 1, device=self._hidden.device)
        beam_on = torch.ones(n, 1, dtype=torch.bool, device=self._hidden.device)
        own: list[tuple[Tensor, Tensor]] = []
        for level in range(depth):
            log_q = self._head.logits(self._hidden).float().log_softmax(-1)
            best, index = log_q.topk(k, dim=-1)  # [n beam k]
            tokens = self._head.target_ids[index]
            child_score = beam_score[..., None] + best
            child_on = beam_on[..., None] & (tokens == future[level][:, None, None])
            scores.append(child_score.flatten(1))
            on_path.append(child_on.flatten(1))
            if level == depth - 1:
                break
            beam_score, kept = child_score.flatten(1).topk(k, dim=-1)
            beam_on = child_on.flatten(1).gather(1, kept)
            parents, beam_tokens = kept // k, tokens.flatten(1).gather(1, kept)
            own = [(_take(key, parents), _take(value, parents)) for key, value in own]
            self._advance(beam_tokens, _take(self._hidden, parents), level + 1, own)
        pool, hits = torch.cat(scores, 1), torch.cat(on_path, 1)
        counts = {}
        for size in sizes:
            chosen = pool.topk(min(size - 1, pool.shape[1]), dim=-1).indices
            counts[size] = hits.gather(1, chosen).sum(-1)
        return counts

    def _advance(self, tokens: Tensor, features: Tensor, level: int, own: list) -> None:
        """Run the head over the beam; `own` holds keys and values of each beam node's ancestors and gets its own."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own.append((k, v))
            scale = q.shape[-1] ** -0.5
            pairs, places = torch.arange(len(self._keys), device=q.device), self._places[:, None, None, None]
            unseen = pairs > places
            if self._head.config.sliding_window is not None:
                unseen |= pairs <= places + level - self._head.config.sliding_window
            scores = torch.einsum("nbhd,thd->nbht", q, self._keys).float() * scale
            scores = scores.masked_fill(unseen, float("-inf"))
            of_path = [
                (q * key.repeat_interleave(self._groups, 2)).sum(-1, keepdim=True).float() * scale for key, _ in own
            ]
            weights = torch.cat([scores, *of_path], -1).softmax(-1).to(v.dtype)
            out = torch.einsum("nbht,thd->nbhd", weights[..., : len(self._keys)], self._values)
            for i, (_, value) in enumerate(own):
                out = out + weights[..., len(self._keys) + i, None] * value.repeat_interleave(self._groups, 2)
            return out

        positions = (self._places + level)[:, None].expand(tokens.shape)
        self._hidden = self._head(self._head.embed(tokens), features, positions, attend)


def _take(x: Float[Tensor, "n b *rest"], parents: Int[Tensor, "n k"]) -> Tensor:
    """Rows of each beam by index."""
    index = parents.reshape(*parents.shape, *([1] * (x.dim() - 2))).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)
