"""Training-time test: the head is unrolled over its own outputs, as it will be used (Li et al., arXiv:2503.01840)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.draft.eagle_head import EagleHead
from specdec.errors import ConfigError
from specdec.train.chains import ChainMemory
from specdec.train.losses import Teacher, soft_cross_entropy


@dataclass(frozen=True)
class TestTimeTraining:
    """How far the head is unrolled and what each step counts."""

    __test__ = False  # pytest takes the name for a test class

    steps: int = 5
    decay: float = 0.8
    """Step `j` weighs `decay ** j` (normalised to sum to 1 over the steps, times their number at no decay)."""
    later_share: float = 1.0
    """Part of the positions that steps 2 and later are held against; a random part costs less and stays unbiased."""
    sharpness: float = 1.5
    """The head learns `softmax(sharpness · target logits)`; above 1 leans towards what greedy decoding needs."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 16:
            raise ConfigError(f"steps={self.steps}; accepted: 1 to 16")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay={self.decay}; accepted: above 0, at most 1")
        if not 0 < self.later_share <= 1:
            raise ConfigError(f"later_share={self.later_share}; accepted: above 0, at most 1")
        if not self.sharpness > 0:
            raise ConfigError(f"sharpness={self.sharpness}; accepted: above 0")


@dataclass(frozen=True)
class Batch:
    """Rows of text, and the places in them that the loss looks at, in random order."""

    tokens: Int[Tensor, "b t"]
    places: Int[Tensor, " n"]
    """Flat indices into `b · t` of tokens whose successor the target chose itself."""
    weights: Float[Tensor, " n"]
    """0 for places that only fill up the fixed number."""


def unroll(
    head: EagleHead, tokens: Int[Tensor, "b t"], taps: tuple[Float[Tensor, "b t f"], ...], steps: int, fast: bool
) -> Iterator[Float[Tensor, "b t-1 d"]]:
    """What the head gives at each step when fed the text's own tokens: row `t` of step `j` predicts token `t + 2 + j`.

    `fast` takes the flash kernel (half precision on CUDA) rather than the definition.
    """
    pairs = tokens.shape[1] - 1
    window = head.config.sliding_window
    if window is not None and window < pairs:
        raise ConfigError(
            f"rows of {tokens.shape[1]} tokens; accepted for a head with a window of {window}: {window + 1}"
        )
    memory = ChainMemory(head.config.head_dim**-0.5, fast)
    hidden = head.fuse(tuple(tap[:, :-1] for tap in taps))
    padded = torch.cat([tokens, tokens.new_zeros(len(tokens), steps)], dim=1)
    positions = torch.arange(pairs, device=tokens.device)[None]
    for step in range(steps):
        seen = padded[:, 1 + step : 1 + step + pairs]
        hidden = head(head.embed(seen), hidden, positions + step, memory.attend)
        yield hidden


def test_time_loss(
    head: EagleHead,
    batch: Batch,
    taps: tuple[Float[Tensor, "b t f"], ...],
    teacher: Teacher,
    recipe: TestTimeTraining,
    fast: bool,
    weight: Float[Tensor, "v d"],
) -> tuple[Float[Tensor, ""], Float[Tensor, "steps 2"]]:
    """The loss, and for each step its own loss and the share of places where it agrees with the target's argmax.

    `teacher` holds one row for each of the `b · t` tokens.
    """
    length = batch.tokens.shape[1]
    total = batch.weights.new_zeros(())
    figures = []
    scale = [recipe.decay**step for step in range(recipe.steps)]
    for step, hidden in enumerate(unroll(head, batch.tokens, taps, recipe.steps, fast)):
        count = len(batch.places) if step < 2 else max(1, int(len(batch.places) * recipe.later_share))
        places = batch.places[:count]
        starts = places % length - 1 - step
        weights = batch.weights[:count] * (starts >= 0)
        weights = weights / weights.sum().clamp(min=1)
        rows = places // length * (length - 1) + starts.clamp(min=0)
        chosen = head.lm_input(hidden).flatten(0, 1)[rows]
        loss, best = soft_cross_entropy(chosen.to(weight.dtype), weight, teacher, places, weights)
        total = total + loss * (scale[step] / sum(scale))
        agreed = ((best == teacher.best[places]) * weights).sum()
        figures.append(torch.stack([loss.detach(), agreed]))
    return total, torch.stack(figures)


test_time_loss.__test__ = False  # type: ignore[attr-defined]
