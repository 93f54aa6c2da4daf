"""A fresh EAGLE-3 head for a Hugging Face model, started from the model's own last layer where that is possible."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.draft.eagle_config import EagleHeadConfig
from specdec.draft.eagle_head import EagleHead
from specdec.draft.rope import RopeConfig
from specdec.errors import ConfigError
from specdec.hf.target import decoder_layers

FULL_VOCABULARY_UP_TO = 65536
"""Largest vocabulary for which the head shares the target's lm_head as it is."""
REDUCED_VOCABULARY = 32000


@dataclass(frozen=True)
class HeadShape:
    """What may be chosen about a head; None takes what suits the target."""

    taps: tuple[int, ...] | None = None
    """Layer inputs that the head reads; by default five, evenly spread from layer 2 to the last."""
    mlp_multiple: float = 1.0
    """Width of the head's MLP relative to a target layer's."""
    draft_vocab_size: int | None = None
    """Tokens that the head can draft; 0 means all of them, with the target's own lm_head."""
    sliding_window: int | None = None
    norm_before_residual: bool = True
    norm_output: bool = True

    def taps_for(self, num_layers: int) -> tuple[int, ...]:
        """The taps of a target with so many layers."""
        if self.taps is not None:
            return self.taps
        first, last = min(2, num_layers - 1), num_layers - 1
        return tuple(sorted({first + round((last - first) * part / 4) for part in range(5)}))

    def vocabulary_for(self, vocab_size: int) -> int | None:
        """Draft vocabulary for a target's; None where the head takes all of it."""
        if self.draft_vocab_size is None:
            return None if vocab_size <= FULL_VOCABULARY_UP_TO else REDUCED_VOCABULARY
        if self.draft_vocab_size in (0, vocab_size):
            return None
        if not 0 < self.draft_vocab_size < vocab_size:
            raise ConfigError(f"draft_vocab_size={self.draft_vocab_size}; accepted: 0 (all) to {vocab_size}")
        return self.draft_vocab_size


def initial_head(model: PreTrainedModel, shape: HeadShape, seed: int = 0) -> EagleHead:
    """An fp32 head on the model's device that borrows the model's embedding (and lm_head, if tied).

    `fc` starts as the identity on the last tap, the layer as a copy of the target's last layer that ignores the
    embedding; targets whose layers are built otherwise give a head with random weights.
    """
    config = head_config(model, shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = EagleHead(config)
        for parameter in head.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
    with torch.no_grad():
        if config.feature_size == config.hidden_size:
            head.fc.weight.zero_()
            head.fc.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
        _copy_last_layer(head, model)
    head = head.float().to(model.device)
    embedding: nn.Module = model.get_input_embeddings()
    lm_head: nn.Module | None = model.get_output_embeddings() if config.tie_lm_head else None
    return head.borrow(_weight(embedding), None if lm_head is None else _weight(lm_head))


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def head_config(model: PreTrainedModel, shape: HeadShape) -> EagleHeadConfig:
    """Shape of a head for the model."""
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    rope = getattr(text, "rope_parameters", None) or {}
    draft_vocabulary = shape.vocabulary_for(text.vocab_size)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return EagleHeadConfig(
        kind="eagle3",
        hidden_size=text.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate_size=int(inner * shape.mlp_multiple),
        vocab_size=text.vocab_size,
        taps=shape.taps_for(text.num_hidden_layers),
        draft_vocab_size=draft_vocabulary,
        rope=RopeConfig(theta=float(rope.get("rope_theta") or 10000.0)),
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
        max_positions=getattr(text, "max_position_embeddings", None),
        sliding_window=shape.sliding_window,
        norm_before_residual=shape.norm_before_residual,
        norm_output=shape.norm_output,
        tie_lm_head=draft_vocabulary is None,
    )


def _copy_last_layer(head: EagleHead, model: PreTrainedModel) -> None:
    source = _named(decoder_layers(model)[-1])
    extra = _named(decoder_layers(model)[-2]) if len(decoder_layers(model)) > 1 else source
    layer, size = head.layer, head.config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        weight, mine = source.get(f"self_attn.{name}.weight"), getattr(layer.self_attn, name).weight
        if weight is not None and mine.shape == (weight.shape[0], 2 * size):
            mine[:, :size] = 0
            mine[:, size:] = weight
    inner = layer.mlp.gate_proj.weight.shape[0]
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight, mine = source.get(f"mlp.{name}.weight"), getattr(layer.mlp, name).weight
        if weight is None or size not in weight.shape:
            continue
        along = 1 if name == "down_proj" else 0
        kept = min(inner, weight.shape[along])
        mine.narrow(along, 0, kept).copy_(weight.narrow(along, 0, kept))
        if inner > kept:  # further units: the layer before, without effect at first
            more = extra[f"mlp.{name}.weight"].narrow(along, 0, min(inner - kept, weight.shape[along]))
            mine.narrow(along, kept, more.shape[along]).copy_(more * (0.0 if along else 1.0))
    pairs = {
        "self_attn.o_proj.weight": layer.self_attn.o_proj.weight,
        "input_layernorm.weight": _weight(layer.hidden_norm or nn.Identity()),
        "post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
    }
    final = getattr(model.base_model, "norm", None)
    if isinstance(final, nn.Module) and head.norm is not None:
        source["norm.weight"] = _weight(final).detach().float().cpu()
        pairs["norm.weight"] = head.norm.weight
    for name, mine in pairs.items():
        if name in source and source[name].shape == mine.shape:
            mine.copy_(source[name])


def _named(layer: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().float().cpu() for name, parameter in layer.named_parameters()}
