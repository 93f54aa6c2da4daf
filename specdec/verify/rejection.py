"""The min(1, p/q) rule for chains that were sampled from a draft distribution.

Accept a draft x with probability min(1, p(x)/q(x)); where it is rejected, sample from the residual (p - q)₊ in its
place.  What is emitted follows p exactly (Leviathan et al. 2022, arXiv:2211.17192, section 2.3 and appendix A.1), and
drafts survive with probability Σ min(p, q), which no rule can better.
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.errors import ConfigError, NonFiniteLogits, UnsupportedError
from specdec.sampling import NO_PICK, Sampler
from specdec.types import Verdict, Window
from specdec.verify.base import Verifier
from specdec.verify.eager import EagerVerifier, make_verdict
from specdec.verify.noise import GraphSafeRandom


@final
class RejectionVerifier(Verifier):
    """Exact in distribution for any draft distribution; the text for a seed depends on the drafts.

    Greedy requests, and drafts that come without a distribution, follow the law of `Verifier` instead: p/q with an
    argmax draft would accept tokens that greedy decoding would not pick.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._random: dict[torch.device, GraphSafeRandom] = {}
        self._law = EagerVerifier()

    def verify(self, logits: Float[Tensor, "b w v"], window: Window, sampler: Sampler) -> Verdict:
        """See `Verifier.verify`.  Raises `UnsupportedError` for trees with a distribution, `ConfigError` where the
        distribution has another shape than the logits."""
        if sampler.greedy or window.draft_probs is None:
            return self._law.verify(logits, window, sampler)
        if not window.is_chain:
            raise UnsupportedError("a tree drafted by sampling; accepted with a draft distribution: chains")
        rows, width, vocabulary = logits.shape
        if window.draft_probs.shape != (rows, width - 1, vocabulary):
            found, expected = tuple(window.draft_probs.shape), (rows, width - 1, vocabulary)
            raise ConfigError(f"draft probabilities of shape {found}; accepted: {expected}, as the logits have it")
        return self._walk(logits, window, window.draft_probs, sampler)

    def _walk(
        self, logits: Float[Tensor, "b w v"], window: Window, draft_probs: Float[Tensor, "b n v"], sampler: Sampler
    ) -> Verdict:
        device = sampler.prompts.device
        random = self._random.setdefault(device, GraphSafeRandom(self._seed, device))
        num_nodes = window.num_nodes.tolist()
        paths = [[0] for _ in num_nodes]
        next_tokens, ended = [0] * len(num_nodes), [False] * len(num_nodes)
        walking, node = list(range(len(num_nodes))), 0
        while walking:
            batch_rows = [window.rows[i] for i in walking]
            p = probabilities(sampler.processed(batch_rows, logits[walking, node]))
            has_draft = torch.tensor([node + 1 < num_nodes[i] for i in walking], device=device)
            survives = torch.zeros_like(has_draft)
            if node + 1 < window.width:
                q = draft_probs[walking, node].to(device=device, dtype=p.dtype)
                drafted = window.tokens[walking, node + 1].to(device)
                survives = has_draft & (random.uniform((len(walking),)) < acceptance_probability(p, q, drafted))
                p = torch.where((has_draft & ~survives)[:, None], residual(p, q, drafted), p)
            picks = (p / random.exponential(p.shape)).argmax(-1)
            if node + 1 < window.width:
                picks = torch.where(survives, drafted, picks)
            tokens, goes_on = picks.tolist(), survives.tolist()
            stops = sampler.push(batch_rows, tokens)
            for i, token, stop in zip(walking, tokens, stops, strict=True):
                next_tokens[i], ended[i] = token, stop
            below = [i for i, on, stop in zip(walking, goes_on, stops, strict=True) if on and not stop]
            # In lockstep nobody goes on alone: the batch would no longer be at one index.
            if sampler.lockstep and len(below) < len(walking):
                below = []
            node += 1
            for i in below:
                paths[i].append(node)
            walking = below
        return make_verdict(paths, next_tokens, ended, window)


def probabilities(scores: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    """Softmax.  Raises `NonFiniteLogits` where a row has none; synchronises."""
    probs = scores.softmax(-1)
    if bool(probs.isnan().any()):
        raise NonFiniteLogits(NO_PICK)
    return probs


def acceptance_probability(
    p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], drafted: Int[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """min(1, p(x)/q(x)); p(x) where q cannot have been what x was sampled from, which treats x as chosen."""
    p_x, q_x = (probs.gather(1, drafted[:, None]).squeeze(1) for probs in (p, q))
    return torch.where(explains(q, drafted), (p_x / q_x).clamp(max=1), p_x)


def residual(p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], drafted: Int[Tensor, " n"]) -> Float[Tensor, "n v"]:
    """What the token in place of a rejected draft x is sampled from, not normalised: (p - q)₊, never x itself.

    Where q cannot have been what x was sampled from, or rounding leaves nothing of the difference: p without x.
    """
    others = p.scatter(1, drafted[:, None], 0.0)
    difference = (p - q).clamp(min=0).scatter(1, drafted[:, None], 0.0)
    usable = explains(q, drafted) & (difference.sum(1) > 0)
    return torch.where(usable[:, None], difference, others)


def explains(q: Float[Tensor, "n v"], drafted: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Whether q is a distribution from which `drafted` can have been sampled; false for NaN, zero and negative rows."""
    sums_to_one = ((q.sum(1) - 1).abs() < 1e-2) & (q >= 0).all(1)
    return sums_to_one & (q.gather(1, drafted[:, None]).squeeze(1) > 0)
