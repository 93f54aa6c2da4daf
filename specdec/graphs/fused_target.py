"""`FusedTarget`: the Llama family's decoder in six launches a layer, over the weights of an unchanged model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from specdec.attention.fused import attend_fused
from specdec.attention.reference import AttentionRules
from specdec.errors import ConfigError
from specdec.kernels import skinny_linear
from specdec.kernels.skinny_linear import Rotation
from specdec.kv.writer import KVStage
from specdec.target import LayerShape, Target, TargetOutput
from specdec.types import Window

MOST_ROWS = 128
"""Rows up to which a product is bound by reading its weight; larger ones go to the vendor's matrix library."""


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
    """A whole model, by reference."""

    embedding: Float[Tensor, "v d"]
    layers: tuple[LayerWeights, ...]
    final_norm: Float[Tensor, " d"]
    lm_head: Float[Tensor, "v d"]
    eps: float
    rotation: Rotation


@final
class FusedTarget(Target):
    """Drives `DecoderWeights` over windows; rounds a little differently from the model's own layers (never worse)."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.weights = weights
        layer, self._head_size = weights.layers[0], 2 * weights.rotation.cos.shape[1]
        dtype, device = weights.embedding.dtype, weights.embedding.device
        kv_heads = layer.qkv[1].shape[0] // self._head_size
        shape = LayerShape(kv_heads, self._head_size, self._head_size, dtype, device)
        self._layers = tuple(shape for _ in weights.layers)

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return self._layers

    @property
    def vocab_size(self) -> int:
        return self.weights.lm_head.shape[0]

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def max_length(self) -> int | None:
        return self.weights.rotation.cos.shape[0]

    @torch.no_grad()
    def forward(
        self, window: Window, writer: KVStage, taps: tuple[int, ...] = (), need_logits: bool = True
    ) -> TargetOutput:
        weights, shape = self.weights, window.tokens.shape
        for tap in taps:
            if not -1 <= tap < len(weights.layers):
                raise ConfigError(f"tap={tap}; accepted: -1 to {len(weights.layers) - 1}")
        features: dict[int, Tensor] = {}
        x = F.embedding(window.tokens.flatten(), weights.embedding)
        for number, layer in enumerate(weights.layers):
            if number in taps:
                features[number] = x.unflatten(0, shape)
            x = self._layer(number, layer, x, window, writer)
        if -1 in taps:
            features[-1] = F.rms_norm(x, weights.final_norm.shape, weights.final_norm, weights.eps).unflatten(0, shape)
        logits = None
        if need_logits:
            product = skinny_linear.linear if len(x) <= MOST_ROWS else skinny_linear.linear_naive
            logits = product(x, weights.lm_head, norm=weights.final_norm, eps=weights.eps).unflatten(0, shape)
        return TargetOutput(logits, tuple(features[tap] for tap in taps))

    def _layer(
        self, number: int, layer: LayerWeights, x: Float[Tensor, "n d"], window: Window, writer: KVStage
    ) -> Float[Tensor, "n d"]:
        few, shape, eps = len(x) <= MOST_ROWS, window.tokens.shape, self.weights.eps
        project = skinny_linear.project_heads if few else skinny_linear.project_heads_naive
        linear = skinny_linear.linear if few else skinny_linear.linear_naive
        gate = skinny_linear.gate if few else skinny_linear.gate_naive
        positions = window.positions.flatten()
        heads = project(x, layer.attention_norm, eps, layer.qkv, layer.qkv_biases, self.weights.rotation, positions)
        q, k, v = (part.unflatten(0, shape) for part in heads)
        attended = attend_fused(q.transpose(1, 2), writer.stage(number, k, v), window, layer.rules)
        x = linear(attended.view(len(x), -1), layer.output, residual=x)
        inner = gate(x, layer.mlp_norm, eps, layer.gate, layer.up)
        return linear(inner, layer.down, residual=x)
