"""Two ways through a decoder layer: fused kernels where reading weights is all there is to do, else the library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, final

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from specdec.graphs.weights import DecoderWeights, LayerWeights, joined
from specdec.kernels.layer_ops import add_norm, rotate_heads, silu_mul
from specdec.kernels.skinny_linear import (
    Blocks,
    Stream,
    add_product,
    embed,
    gate,
    normed_product,
    project_heads,
    tile_rows,
)

Tilings = Mapping[tuple[str, int], Blocks]
"""How to cut a product, by its name (`qkv`, `output`, `gate`, `down`, `lm_head`) and `tile_rows`."""

Heads = tuple[Float[Tensor, "n heads dh"], Float[Tensor, "n h dh"], Float[Tensor, "n h dh"]]

State = TypeVar("State")


class Route(ABC, Generic[State]):
    """A forward in pieces, around attention; `State` is the residual stream and what the next piece wants of it."""

    pdl: bool = False
    """Whether kernels start while the one in front of them ends."""

    @abstractmethod
    def start(self, tokens: Int[Tensor, " n"]) -> State:
        """Embeddings."""

    @abstractmethod
    def project(self, layer: LayerWeights, state: State, positions: Int[Tensor, " n"]) -> Heads:
        """Norm, Q, K, V, rotation."""

    @abstractmethod
    def finish(
        self, layer: LayerWeights, state: State, attended: Float[Tensor, "n q"], next_norm: Float[Tensor, " d"]
    ) -> State:
        """The layer behind its attention; `next_norm` is the weight of the norm that follows."""

    @abstractmethod
    def stream(self, state: State) -> Float[Tensor, "n d"]:
        """The residual stream itself."""

    @abstractmethod
    def logits(self, state: State) -> Float[Tensor, "n v"]:
        """Final norm and `lm_head`."""


@final
class FusedRoute(Route[Stream]):
    """Six launches a layer, two of them attention's."""

    def __init__(self, weights: DecoderWeights, rows: int, tilings: Tilings, pdl: bool) -> None:
        self._weights = weights
        self._tilings = tilings
        self._tile_rows = tile_rows(rows)
        self.pdl = pdl

    def start(self, tokens: Int[Tensor, " n"]) -> Stream:
        return embed(tokens, self._weights.embedding, self._weights.layers[0].attention_norm, self.pdl)

    def project(self, layer: LayerWeights, state: Stream, positions: Int[Tensor, " n"]) -> Heads:
        weights = self._weights
        return project_heads(
            state, weights.eps, layer.qkv, layer.qkv_biases, weights.rotation, positions, **self._cut("qkv")
        )

    def finish(
        self, layer: LayerWeights, state: Stream, attended: Float[Tensor, "n q"], next_norm: Float[Tensor, " d"]
    ) -> Stream:
        state = add_product(attended, layer.output, state, layer.mlp_norm, **self._cut("output"))
        inner = gate(state, self._weights.eps, layer.gate, layer.up, **self._cut("gate"))
        return add_product(inner, layer.down, state, next_norm, **self._cut("down"))

    def stream(self, state: Stream) -> Float[Tensor, "n d"]:
        return state.x

    def logits(self, state: Stream) -> Float[Tensor, "n v"]:
        return normed_product(state, self._weights.eps, self._weights.lm_head, **self._cut("lm_head"))

    def _cut(self, name: str) -> dict[str, Any]:
        return {"blocks": self._tilings.get((name, self._tile_rows)), "pdl": self.pdl}


LibraryState = tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]
"""The residual stream, and what the next product reads: its norm."""


@final
class LibraryRoute(Route[LibraryState]):
    """Products by the vendor's matrix library, the rest in one launch each.

    Q, K and V are one product where their weights lie together (see `joined`), and so are gate and up.
    """

    def __init__(self, weights: DecoderWeights) -> None:
        self._weights = weights

    def start(self, tokens: Int[Tensor, " n"]) -> LibraryState:
        x = F.embedding(tokens, self._weights.embedding)
        return add_norm(x, None, self._weights.layers[0].attention_norm, self._weights.eps)

    def project(self, layer: LayerWeights, state: LibraryState, positions: Int[Tensor, " n"]) -> Heads:
        q, k, v = multiply(state[1], layer.qkv)
        if layer.qkv_biases is not None:
            q, k, v = (part + bias for part, bias in zip((q, k, v), layer.qkv_biases, strict=True))
        heads = rotate_heads(q, k, self._weights.rotation, positions)
        return *heads, v.unflatten(1, (-1, self._weights.head_size))

    def finish(
        self, layer: LayerWeights, state: LibraryState, attended: Float[Tensor, "n q"], next_norm: Float[Tensor, " d"]
    ) -> LibraryState:
        eps = self._weights.eps
        x, normed = add_norm(state[0], F.linear(attended, layer.output), layer.mlp_norm, eps)
        gated, up = multiply(normed, (layer.gate, layer.up))
        return add_norm(x, F.linear(silu_mul(gated, up), layer.down), next_norm, eps)

    def stream(self, state: LibraryState) -> Float[Tensor, "n d"]:
        return state[0]

    def logits(self, state: LibraryState) -> Float[Tensor, "n v"]:
        return F.linear(state[1], self._weights.lm_head)


def multiply(x: Float[Tensor, "n d"], matrices: tuple[Float[Tensor, "_ d"], ...]) -> tuple[Tensor, ...]:
    """`x` times each matrix: one product, whose parts are views, where the matrices lie together."""
    whole = joined(matrices)
    if whole is None:
        return tuple(F.linear(x, matrix) for matrix in matrices)
    return F.linear(x, whole).split([len(matrix) for matrix in matrices], dim=1)
