"""EAGLE draft heads in plain torch: one decoder layer over target features and token embeddings.

EAGLE-1 and 2: Li et al. 2024, arXiv:2401.15077 and 2406.16858.  EAGLE-3: Li et al. 2025, arXiv:2503.01840.
Pairs are (f_t, x_{t+1}): the feature of a token with the embedding of the token behind it; the output predicts x_{t+2}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.draft.eagle_config import ACTIVATIONS, EagleHeadConfig
from specdec.draft.rope import cos_sin, rotate
from specdec.errors import CheckpointError, ConfigError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(q [b w heads d], k [b w h d], v [b w h d]) → [b w heads d]`: rotated, not scaled; the caller owns the mask."""


@final
class RMSNorm(nn.Module):
    """Root-mean-square norm, as in Llama."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@final
class Attention(nn.Module):
    """Projections of the layer's attention; the attention itself is the caller's."""

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__()
        width = config.hidden_size * (2 if config.kind == "eagle3" else 1)
        bias, output_bias = config.attention_bias, config.output_bias
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(
            config.num_heads * config.head_dim, config.hidden_size, bias=bias if output_bias is None else output_bias
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def queries(self, x: Float[Tensor, "b w d2"]) -> Float[Tensor, "b w heads d"]:
        """Queries, not rotated yet."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return q if self.q_norm is None else self.q_norm(q)

    def keys_values(self, x: Float[Tensor, "b w d2"]) -> tuple[Float[Tensor, "b w h d"], Float[Tensor, "b w h d"]]:
        """Keys, not rotated yet, and values."""
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return (k if self.k_norm is None else self.k_norm(k)), v


@final
class MLP(nn.Module):
    """Gated feed-forward part of the layer."""

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


@final
class Layer(nn.Module):
    """The head's decoder layer: parameters only; `EagleHead` says how they work together."""

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps) if config.kind == "eagle3" else None
        self.hidden_norm = RMSNorm(config.hidden_size, eps) if config.kind == "eagle3" else None
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps)


@final
class EagleHead(nn.Module):
    """A draft head; its parameters bear the names of the speculators format.

    Use: `fuse` the target's taps, `embed` the tokens behind them, `forward` with an attention of the caller's, `logits`
    of what comes out; what `forward` returned stands in for the fused features at the next draft step.
    """

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        fc_width = len(config.taps) * config.feature_size + (size if config.kind == "eagle1" else 0)
        self.fc = nn.Linear(fc_width, size, bias=config.fc_bias)
        self.input_norm = RMSNorm(fc_width, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(config.feature_size, eps) for _ in config.taps) if config.fc_norm else None
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = RMSNorm(size, eps) if config.final_norm else None
        self.lm_head = None if config.tie_lm_head else nn.Linear(size, config.num_draft_tokens, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embeddings else None
        # Module.to(dtype) would round a floating-point buffer; the frequencies stay in fp32 and move when used.
        self._frequencies = config.rope.frequencies(config.head_dim)
        self.target_ids: Tensor
        self.token_order: Tensor | None
        ids = torch.arange(config.num_draft_tokens, device="cpu")
        self.register_buffer("target_ids", ids, persistent=False)
        self.register_buffer("token_order", None, persistent=False)
        self._borrowed: dict[str, Tensor] = {}

    @property
    def layer(self) -> Layer:
        """The decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the head computes in."""
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the head lies."""
        return self.fc.weight.device

    # -- what the head shares with its target -------------------------------------------------------------------------

    def borrow(
        self, embeddings: Float[Tensor, "v d"] | None = None, lm_head: Float[Tensor, "v d"] | None = None
    ) -> EagleHead:
        """Use the target's weights where the head has none of its own; they are neither parameters nor saved.

        Returns self.  Raises `CheckpointError` where they do not fit.
        """
        config = self.config
        for name, own, weight in (
            ("embed_tokens.weight", config.own_embeddings, embeddings),
            ("lm_head.weight", not config.tie_lm_head, lm_head),
        ):
            if own or weight is None:
                continue
            expected = (config.vocab_size, config.hidden_size)
            # A target may pad its embedding beyond the vocabulary; rows are looked up by id, so more rows do no harm.
            if weight.shape[1] != expected[1] or weight.shape[0] < expected[0]:
                raise CheckpointError(
                    f"the target's {name}: expected {expected} for this head, found {tuple(weight.shape)}"
                )
            self._borrowed[name] = weight.detach()
        return self

    @property
    def embedding_weight(self) -> Float[Tensor, "v d"]:
        """The embedding in use.  Raises `ConfigError` where neither owned nor borrowed."""
        return self.embed_tokens.weight if self.embed_tokens is not None else self._lent("embed_tokens.weight")

    @property
    def lm_head_weight(self) -> Float[Tensor, "n d"]:
        """Rows of `lm_head` for the draft vocabulary, in its order.

        Raises `ConfigError` where neither owned nor borrowed.
        """
        if self.lm_head is not None:
            return self.lm_head.weight
        weight = self._lent("lm_head.weight")
        ids = self.target_ids.to(weight.device)
        identity = len(ids) == len(weight) and bool((ids == torch.arange(len(ids), device=ids.device)).all())
        return weight if identity else weight[ids]

    def _lent(self, name: str) -> Tensor:
        if name not in self._borrowed:
            raise ConfigError(f"the head has no {name}; lend it the target's with EagleHead.borrow")
        return self._borrowed[name]

    # -- vocabulary ---------------------------------------------------------------------------------------------------

    @property
    def d2t(self) -> Int[Tensor, " n"]:
        """Offsets of the draft vocabulary: token `i` of the head is `i + d2t[i]` of the target."""
        return self.target_ids - torch.arange(len(self.target_ids), device=self.target_ids.device)

    @property
    def t2d(self) -> Tensor:
        """bool[v]: whether the head can draft a token of the target."""
        known = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=self.target_ids.device)
        known[self.target_ids] = True
        return known

    def set_vocabulary(self, target_ids: Int[Tensor, " n"]) -> None:
        """Say which target tokens the head drafts, in the order of its logits.

        Raises `CheckpointError` for a map that cannot be.
        """
        expected, size = self.config.num_draft_tokens, self.config.vocab_size
        if target_ids.shape != (expected,):
            raise CheckpointError(f"d2t: expected shape ({expected},), found {tuple(target_ids.shape)}")
        if bool(((target_ids < 0) | (target_ids >= size)).any()):
            low, high = int(target_ids.min()), int(target_ids.max())
            raise CheckpointError(f"d2t: expected target ids from 0 to {size - 1}, found ids from {low} to {high}")
        if len(target_ids.unique()) != expected:
            raise CheckpointError(f"d2t: expected {expected} distinct target ids, found {len(target_ids.unique())}")
        self.target_ids.copy_(target_ids)

    def set_token_order(self, order: Int[Tensor, " v"] | None) -> None:
        """Say which target tokens are frequent, most frequent first: what a narrower vocabulary keeps."""
        if order is not None:
            size = self.config.vocab_size
            if len(order) > size or bool(((order < 0) | (order >= size)).any()) or len(order.unique()) != len(order):
                raise CheckpointError(
                    f"token_order: expected distinct ids from 0 to {size - 1}, found {tuple(order.shape)}"
                )
        self.token_order = order

    # -- the head itself ----------------------------------------------------------------------------------------------

    def embed(self, tokens: Int[Tensor, "b w"]) -> Float[Tensor, "b w d"]:
        """Embeddings of target tokens, in the head's dtype."""
        return F.embedding(tokens, self.embedding_weight).to(self.dtype)

    def fuse(self, taps: tuple[Float[Tensor, "b w f"], ...]) -> Float[Tensor, "b w d"]:
        """What the layer gets of the target's features.

        For EAGLE-1, whose `fc` reads the embedding too, that is the feature itself.
        """
        if self.config.kind == "eagle1":
            return taps[0].to(self.dtype)
        if self.fc_norm is not None:
            taps = tuple(norm(tap.to(self.dtype)) for norm, tap in zip(self.fc_norm, taps, strict=True))
        joined = torch.cat(taps, dim=-1).to(self.dtype)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def layer_inputs(
        self, embeddings: Float[Tensor, "b w d"], features: Float[Tensor, "b w d"]
    ) -> tuple[Float[Tensor, "b w d2"], Float[Tensor, "b w d"]]:
        """What the attention reads, and the residual beside it."""
        layer = self.layer
        if layer.input_layernorm is None or layer.hidden_norm is None:
            mixed = self.fc(torch.cat([embeddings, features], dim=-1))
            return mixed, mixed
        normed = layer.hidden_norm(features)
        joined = torch.cat([layer.input_layernorm(embeddings), normed], dim=-1)
        return joined, normed if self.config.norm_before_residual else features

    def cos_sin(self, positions: Int[Tensor, "b w"]) -> tuple[Float[Tensor, "b w d"], Float[Tensor, "b w d"]]:
        """Rotation of each position."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        return cos_sin(self._frequencies, positions, self.config.rope.attention_factor, self.dtype)

    def keys_values(
        self, inputs: Float[Tensor, "b w d2"], rotation: tuple[Tensor, Tensor]
    ) -> tuple[Float[Tensor, "b w h d"], Float[Tensor, "b w h d"]]:
        """Keys and values of some pairs; since there is one layer, they depend on the pair and its position only."""
        k, v = self.layer.self_attn.keys_values(inputs)
        return rotate(k, *rotation), v

    def queries(self, inputs: Float[Tensor, "b w d2"], rotation: tuple[Tensor, Tensor]) -> Float[Tensor, "b w heads d"]:
        """Queries of some pairs."""
        return rotate(self.layer.self_attn.queries(inputs), *rotation)

    def finish(
        self, residual: Float[Tensor, "b w d"], attended: Float[Tensor, "b w heads d"]
    ) -> Float[Tensor, "b w d"]:
        """The layer behind its attention; returns what the next draft step gets in place of features."""
        layer = self.layer
        hidden = residual + layer.self_attn.o_proj(attended.flatten(-2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden) if self.norm is not None and self.config.norm_output else hidden

    def forward(
        self,
        embeddings: Float[Tensor, "b w d"],
        features: Float[Tensor, "b w d"],
        positions: Int[Tensor, "b w"],
        attend: Attend,
    ) -> Float[Tensor, "b w d"]:
        """One draft step for some pairs: `features` are fused ones, or what an earlier step returned."""
        inputs, residual = self.layer_inputs(embeddings, features)
        rotation = self.cos_sin(positions)
        k, v = self.keys_values(inputs, rotation)
        return self.finish(residual, attend(self.queries(inputs, rotation), k, v))

    def lm_input(self, hidden: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What `lm_head` reads of a hidden state that `forward` returned."""
        return hidden if self.norm is None or self.config.norm_output else self.norm(hidden)

    def logits(self, hidden: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        """Logits over the draft vocabulary."""
        weight = self.lm_head_weight
        return F.linear(self.lm_input(hidden).to(weight.dtype), weight)


def causal_attention(scaling: float) -> Attend:
    """Plain causal attention over the pairs of one call: for a whole sequence at once."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped).transpose(
            1, 2
        )

    return attend
