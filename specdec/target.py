"""`Target`: a model that can verify a window.  The loop and everything below it know models only through this class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.kv.writer import KVStage
from specdec.types import Window


@dataclass(frozen=True)
class LayerShape:
    """K/V rows of one attention layer."""

    num_kv_heads: int
    k_size: int
    v_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in this layer."""
        return self.num_kv_heads * (self.k_size + self.v_size) * self.dtype.itemsize


@dataclass(frozen=True)
class TargetOutput:
    """What one forward over a window returns."""

    logits: Float[Tensor, "b w v"] | None
    features: tuple[Float[Tensor, "b w d"], ...]


class Target(ABC):
    """Drives one model over windows, without its own cache."""

    @property
    @abstractmethod
    def layers(self) -> tuple[LayerShape, ...]:
        """Shape of each attention layer's K/V rows, in the order of the layer indices given to `KVStage.stage`."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Columns of the logits."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where token ids go in."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Most tokens of a sequence (prompt and output), None where the model states no limit."""

    @abstractmethod
    def forward(
        self, window: Window, writer: KVStage, taps: tuple[int, ...] = (), need_logits: bool = True
    ) -> TargetOutput:
        """Run the model over the window's nodes; each layer stages its K/V rows with `writer` and attends to what
        that returns.

        `taps` are defined in `Drafter.taps`.  With `need_logits=False` (prefill) the logits are None.
        """
