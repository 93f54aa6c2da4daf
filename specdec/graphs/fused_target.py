"""`FusedTarget`: the Llama family's decoder in few launches, over the weights of an unchanged model."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from specdec.attention.fused import attend_fused
from specdec.errors import ConfigError
from specdec.graphs.routes import FusedRoute, LibraryRoute, Route, Tilings
from specdec.graphs.weights import DecoderWeights
from specdec.kv.writer import KVStage
from specdec.target import LayerShape, Target, TargetOutput
from specdec.types import Window

SMALL_HIDDEN_SIZE = 2048
"""Below it a product takes about as long as its launch, and saved launches count; from it on the matrix library's
tensor-core products are faster than ours (measured at 576 and 3072; docs/explanation/performance.md)."""

MOST_FUSED_ROWS = {True: 64, False: 4}
"""Rows up to which fused kernels are used, for small and for large models."""


@final
class FusedTarget(Target):
    """Drives `DecoderWeights` over windows; it rounds in other places than the model's own layers."""

    def __init__(self, weights: DecoderWeights, tilings: Tilings | None = None, pdl: bool | None = None) -> None:
        """Args:
        tilings: measured ones; what is missing is chosen by a rule of thumb.
        pdl: let fused kernels start while the one in front of them ends; None: where the device can (Hopper and later).
        """
        self.weights = weights
        self.tilings = tilings or {}
        dtype, device = weights.embedding.dtype, weights.embedding.device
        self.pdl = can_launch_early(device) if pdl is None else pdl
        kv_heads = weights.layers[0].qkv[1].shape[0] // weights.head_size
        shape = LayerShape(kv_heads, weights.head_size, weights.head_size, dtype, device)
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

    def route(self, rows: int) -> FusedRoute | LibraryRoute:
        """How a forward over so many rows is computed."""
        small = self.weights.hidden_size < SMALL_HIDDEN_SIZE
        if rows <= MOST_FUSED_ROWS[small]:
            return FusedRoute(self.weights, rows, self.tilings, self.pdl)
        return LibraryRoute(self.weights)

    @torch.no_grad()
    def forward(
        self, window: Window, writer: KVStage, taps: tuple[int, ...] = (), need_logits: bool = True
    ) -> TargetOutput:
        for tap in taps:
            if not -1 <= tap < len(self._layers):
                raise ConfigError(f"tap={tap}; accepted: -1 to {len(self._layers) - 1}")
        logits, features = self._run(self.route(window.tokens.numel()), window, writer, taps, need_logits)
        return TargetOutput(logits, features)

    def _run(
        self, route: Route, window: Window, writer: KVStage, taps: tuple[int, ...], need_logits: bool
    ) -> tuple[Float[Tensor, "b w v"] | None, tuple[Float[Tensor, "b w d"], ...]]:
        weights, shape = self.weights, window.tokens.shape
        norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.final_norm]
        positions = window.positions.flatten()
        features: dict[int, Tensor] = {}
        state = route.start(window.tokens.flatten())
        for number, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
            if number in taps:
                features[number] = route.stream(state).unflatten(0, shape)
            q, k, v = (part.unflatten(0, shape) for part in route.project(layer, state, positions))
            view = writer.stage(number, k, v)
            attended = attend_fused(q.transpose(1, 2), view, window, layer.rules, pdl=route.pdl)
            state = route.finish(layer, state, attended.view(len(positions), -1), next_norm)
        if -1 in taps:
            normed = F.rms_norm(route.stream(state), weights.final_norm.shape, weights.final_norm, weights.eps)
            features[-1] = normed.unflatten(0, shape)
        logits = route.logits(state).unflatten(0, shape) if need_logits else None
        return logits, tuple(features[tap] for tap in taps)


def can_launch_early(device: torch.device) -> bool:
    """Whether programmatic dependent launch exists there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
