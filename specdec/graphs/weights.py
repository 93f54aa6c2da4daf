"""The weights of a Llama-like decoder, by reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.attention.reference import AttentionRules
from specdec.kernels.skinny_linear import Rotation


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: RMSNorm, attention, RMSNorm, gated MLP.  Matrices are `[out, in]`."""

    attention_norm: Float[Tensor, " d"]
    qkv: tuple[Float[Tensor, "q d"], Float[Tensor, "k d"], Float[Tensor, "k d"]]
    qkv_biases: tuple[Float[Tensor, " q"], Float[Tensor, " k"], Float[Tensor, " k"]] | None
    output: Float[Tensor, "d q"]
    mlp_norm: Float[Tensor, " d"]
    gate: Float[Tensor, "i d"]
    up: Float[Tensor, "i d"]
    down: Float[Tensor, "d i"]
    rules: AttentionRules


@dataclass(frozen=True)
class DecoderWeights:
    """A whole model."""

    embedding: Float[Tensor, "v d"]
    layers: tuple[LayerWeights, ...]
    final_norm: Float[Tensor, " d"]
    lm_head: Float[Tensor, "v d"]
    eps: float
    rotation: Rotation

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.embedding.shape[1]

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return 2 * self.rotation.cos.shape[1]


def joined(parts: tuple[Float[Tensor, "_ d"], ...]) -> Float[Tensor, "o d"] | None:
    """The matrices as one, without a copy, where they lie one behind the other in one storage; None otherwise."""
    first = parts[0]
    rows, place = 0, first.storage_offset()
    for part in parts:
        together = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not together or not part.is_contiguous() or part.storage_offset() != place + rows * first.shape[1]:
            return None
        rows += part.shape[0]
    return torch.as_strided(first, (rows, first.shape[1]), (first.shape[1], 1), place)
