"""Random variates that may be drawn inside a captured graph: fresh ones on every replay, none of them NaN or infinite.

`GeneratorNoise` serves the loop, which is keyed by generated index and lives on the host; these serve whatever draws on
the device, such as the rejection rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

RESOLUTION = 1 << 23
"""Distinct uniform values; (k + ½) / 2²³ is exact in fp32 for all of them, so 0 and 1 never occur."""


@final
class GraphSafeRandom:
    """A generator of its own, and the variates that verification needs from it.

    `register` ties it to a CUDA graph before capture; a replay then moves the generator on, as an eager call would.
    """

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.generator = torch.Generator(device)
        self.generator.manual_seed(seed)

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Let the graph draw from this generator."""
        graph.register_generator_state(self.generator)

    def uniform(self, shape: Sequence[int]) -> Float[Tensor, ...]:
        """Uniform in the open interval (0, 1)."""
        draws = torch.rand(tuple(shape), generator=self.generator, device=self.generator.device)
        return draws.mul_(RESOLUTION).floor_().add_(0.5).mul_(1 / RESOLUTION)

    def exponential(self, shape: Sequence[int]) -> Float[Tensor, ...]:
        """Exponential with rate 1: positive and at most 24 ln 2 = 16.6."""
        return self.uniform(shape).log_().neg_()

    def gumbel(self, shape: Sequence[int]) -> Float[Tensor, ...]:
        """Standard Gumbel, −ln of an exponential: between −2.9 and 16.7."""
        return self.exponential(shape).log_().neg_()
