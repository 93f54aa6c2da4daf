"""Configuration of EAGLE draft heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from specdec.draft.rope import RopeConfig
from specdec.errors import ConfigError, choose

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class EagleHeadConfig:
    """Shape and wiring of a head.

    SafeAILab's EAGLE-3 has all norm options but `final_norm` False; speculators trains with `norm_before_residual`,
    `norm_before_fc` and `norm_output`; EAGLE-3.1 is `fc_norm` and `norm_output`.
    """

    kind: str
    """`eagle1` (EAGLE-1 and 2) or `eagle3`."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Tokens of the target: rows of the embedding."""
    taps: tuple[int, ...]
    """Target features that the head reads, as in `Drafter.taps`: layer inputs, -1 for the final hidden state."""
    draft_vocab_size: int | None = None
    """Tokens that the head can draft; None: all of them."""
    target_hidden_size: int | None = None
    """Width of the target's features; None: `hidden_size`."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    rms_norm_eps: float = 1e-6
    activation: str = "silu"
    max_positions: int | None = None
    """Positions that the head was made for; nothing is drafted beyond them."""
    sliding_window: int | None = None
    """Pairs that the head's attention sees (its own included); None: all."""
    norm_before_residual: bool = False
    """The residual branches off behind `hidden_norm` rather than before it."""
    norm_before_fc: bool = False
    """One RMSNorm over all taps together before `fc` (tensor `input_norm`)."""
    fc_norm: bool = False
    """One RMSNorm for each tap before `fc`."""
    norm_output: bool = False
    """The next draft step gets the hidden state behind the final norm rather than before it."""
    final_norm: bool = True
    """Whether a norm stands before `lm_head`; `eagle1` heads have none."""
    fc_bias: bool = False
    attention_bias: bool = False
    output_bias: bool | None = None
    """Bias of `o_proj`; None: as `attention_bias`."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation (Qwen 3)."""
    tie_lm_head: bool = False
    """`lm_head` is the target's (its rows of the draft vocabulary)."""
    own_embeddings: bool = False
    """The head has an `embed_tokens` of its own rather than the target's."""

    def __post_init__(self) -> None:
        choose("kind", self.kind, dict.fromkeys(("eagle1", "eagle3")))
        choose("activation", self.activation, dict(ACTIVATIONS))
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"):
            _require_positive(name, getattr(self, name))
        for name in ("draft_vocab_size", "target_hidden_size", "max_positions", "sliding_window"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if not self.taps:
            raise ConfigError("taps=(); accepted: at least one target feature")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads}; accepted: a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim}; accepted: even numbers")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size={self.draft_vocab_size}; accepted: at most vocab_size={self.vocab_size}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc=True, fc_norm=True; accepted: at most one of them")
        if self.norm_output and not self.final_norm:
            raise ConfigError("norm_output=True, final_norm=False; accepted: a final norm where its output is fed back")
        if self.kind == "eagle1":
            self._check_eagle1()

    def _check_eagle1(self) -> None:
        if len(self.taps) != 1:
            raise ConfigError(f"taps={self.taps}; accepted for kind 'eagle1': one tap")
        if self.feature_size != self.hidden_size:
            raise ConfigError(
                f"target_hidden_size={self.feature_size}; accepted for kind 'eagle1': hidden_size={self.hidden_size}"
            )
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "final_norm"):
            if getattr(self, name):
                raise ConfigError(f"{name}=True; accepted for kind 'eagle1': False")

    @property
    def feature_size(self) -> int:
        """Width of one tap."""
        return self.target_hidden_size or self.hidden_size

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the head can draft: rows of `lm_head`."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is a part of the target's, with a map between them."""
        return self.num_draft_tokens != self.vocab_size


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}; accepted: a positive integer")
