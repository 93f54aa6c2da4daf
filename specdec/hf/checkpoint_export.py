"""Heads in the formats of other projects: their configuration files and tensor names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.draft.eagle_config import EagleHeadConfig
from specdec.draft.eagle_head import EagleHead
from specdec.errors import UnsupportedError

SPECULATORS_VERSION = "0.9.0"
"""Version of the speculators package whose format is written."""

Export = tuple[dict[str, Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Verifier:
    """The target as an exported configuration names it."""

    name_or_path: str | None = None
    architectures: tuple[str, ...] = ()
    speculative_tokens: int = 5
    """Tokens that other engines should draft with the head unless told otherwise."""


def speculators(head: EagleHead, tensors: dict[str, Tensor], verifier: Verifier) -> Export:
    """The format of the speculators package, which vLLM loads."""
    config = head.config
    _refuse(
        "speculators",
        kind=(config.kind, "eagle3"),
        final_norm=(config.final_norm, True),
        fc_bias=(config.fc_bias, False),
    )
    output_bias = config.attention_bias if config.output_bias is None else config.output_bias
    _refuse("speculators", output_bias=(output_bias, config.attention_bias))
    if config.qk_norm:
        _refuse("speculators", mlp_bias=(config.mlp_bias, False))
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": layer_config(config, "qwen3" if config.qk_norm else "llama"),
        "draft_vocab_size": config.num_draft_tokens,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "target_hidden_size": config.target_hidden_size,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(head.dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": verifier.speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)},
        },
    }, dict(tensors)


def safeailab(head: EagleHead, tensors: dict[str, Tensor], verifier: Verifier) -> Export:
    """The format of SafeAILab's EAGLE, which SGLang loads as well."""
    config = head.config
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "mlp_bias"):
        _refuse("safeailab", **{name: (getattr(config, name), False)})
    written = layer_config(config, "llama") | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    written["dtype"] = written["torch_dtype"] = str(head.dtype).removeprefix("torch.")
    if config.kind == "eagle1":
        return written | {"bias": config.fc_bias}, dict(tensors)
    _refuse(
        "safeailab",
        final_norm=(config.final_norm, True),
        fc_bias=(config.fc_bias, False),
        lm_head=("lm_head.weight" in tensors, True),
    )
    written |= {
        "draft_vocab_size": config.num_draft_tokens,
        # Not part of the format, which takes layers 2, n/2 and n - 3 for granted; others skip keys they do not know.
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
    }
    if config.target_hidden_size is not None:
        written["target_hidden_size"] = config.target_hidden_size
    return written, {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


EXPORTS: dict[str, Callable[[EagleHead, dict[str, Tensor], Verifier], Export]] = {
    "speculators": speculators,
    "safeailab": safeailab,
}


def layer_config(config: EagleHeadConfig, model_type: str) -> dict[str, Any]:
    """The Hugging Face configuration of the head's layer; the rotation is written in the old way and in the new."""
    rope = config.rope
    written: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else {"rope_type": rope.kind, **rope.scaling},
        "rope_parameters": {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.scaling},
    }
    if config.max_positions is not None:
        written["max_position_embeddings"] = config.max_positions
    if config.sliding_window is not None:
        written |= {
            "sliding_window": config.sliding_window,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention"],
        }
    return written


def _refuse(format: str, **values: tuple[object, object]) -> None:
    for name, (found, accepted) in values.items():
        if found != accepted:
            raise UnsupportedError(f"the {format} format cannot express {name}={found!r}; accepted: {accepted!r}")
