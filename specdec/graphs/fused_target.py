"""`FusedTarget`: the Llama family's decoder in six launches a layer, over the weights of an unchanged model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from specdec.attention.fused import attend_fused
from specdec.attention.reference import AttentionRules
from specdec.errors import ConfigError
from specdec.kernels import skinny_linear as products
from specdec.kernels.skinny_linear import Blocks, Rotation, Stream
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


Tilings = Mapping[tuple[str, int], Blocks]
"""How to cut a product, by its name (`qkv`, `output`, `gate`, `down`, `lm_head`) and `tile_rows`."""


@final
class FusedTarget(Target):
    """Drives `DecoderWeights` over windows; it rounds in other places than the model's own layers."""

    def __init__(self, weights: DecoderWeights, tilings: Tilings | None = None, pdl: bool = False) -> None:
        """Args:
        tilings: measured ones; what is missing is chosen by a rule of thumb.
        pdl: let kernels start while the one in front of them ends (Hopper and later).
        """
        self.weights = weights
        self.tilings = tilings or {}
        self.pdl = pdl
        head_size = 2 * weights.rotation.cos.shape[1]
        dtype, device = weights.embedding.dtype, weights.embedding.device
        kv_heads = weights.layers[0].qkv[1].shape[0] // head_size
        shape = LayerShape(kv_heads, head_size, head_size, dtype, device)
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
        ops = self._operations(window.tokens.numel())
        norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.final_norm]
        features: dict[int, Tensor] = {}
        stream = ops.embed(window.tokens.flatten(), weights.embedding, weights.layers[0].attention_norm)
        for number, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
            if number in taps:
                features[number] = stream.x.unflatten(0, shape)
            stream = self._layer(number, layer, next_norm, stream, window, writer, ops)
        if -1 in taps:
            normed = F.rms_norm(stream.x, weights.final_norm.shape, weights.final_norm, weights.eps)
            features[-1] = normed.unflatten(0, shape)
        logits = ops.logits(stream, weights.eps, weights.lm_head).unflatten(0, shape) if need_logits else None
        return TargetOutput(logits, tuple(features[tap] for tap in taps))

    def _layer(
        self,
        number: int,
        layer: LayerWeights,
        next_norm: Float[Tensor, " d"],
        stream: Stream,
        window: Window,
        writer: KVStage,
        ops: Operations,
    ) -> Stream:
        eps, shape = self.weights.eps, window.tokens.shape
        positions = window.positions.flatten()
        heads = ops.project(stream, eps, layer.qkv, layer.qkv_biases, self.weights.rotation, positions)
        q, k, v = (part.unflatten(0, shape) for part in heads)
        view = writer.stage(number, k, v)
        attended = attend_fused(q.transpose(1, 2), view, window, layer.rules, pdl=ops.pdl)
        stream = ops.add_output(attended.view(len(stream.x), -1), layer.output, stream, layer.mlp_norm)
        inner = ops.gate(stream, eps, layer.gate, layer.up)
        return ops.add_down(inner, layer.down, stream, next_norm)

    def _operations(self, rows: int) -> Operations:
        if rows > MOST_ROWS:
            return Operations(
                pdl=False,
                embed=lambda tokens, table, norm: products.stream_naive(F.embedding(tokens, table), norm),
                project=products.project_heads_naive,
                add_output=products.add_product_naive,
                gate=products.gate_naive,
                add_down=products.add_product_naive,
                logits=products.normed_product_naive,
            )

        def cut(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
            return partial(operation, blocks=self.tilings.get((name, products.tile_rows(rows))), pdl=self.pdl)

        return Operations(
            pdl=self.pdl,
            embed=partial(products.embed, pdl=self.pdl),
            project=cut("qkv", products.project_heads),
            add_output=cut("output", products.add_product),
            gate=cut("gate", products.gate),
            add_down=cut("down", products.add_product),
            logits=cut("lm_head", products.normed_product),
        )


@dataclass(frozen=True)
class Operations:
    """The products of a layer: fused kernels for few rows, their twins over the matrix library for many."""

    pdl: bool
    embed: Callable[..., Stream]
    project: Callable[..., tuple[Tensor, Tensor, Tensor]]
    add_output: Callable[..., Stream]
    gate: Callable[..., Tensor]
    add_down: Callable[..., Stream]
    logits: Callable[..., Tensor]
