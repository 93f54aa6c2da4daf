"""What a model is, and whether specdec can drive it: read off its configuration, without its weights."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from specdec.attention.reference import AttentionRules
from specdec.errors import ModelUnavailable, UnsupportedError, choose
from specdec.hf.models import DEFAULT_CACHE, DTYPES, Source, find_source, first_sentence
from specdec.hf.smollm2 import OnProgress
from specdec.hf.target import HFTarget, ModelProfile

HOST_SIDE_ROPE = ("dynamic", "longrope")
"""Rope types that read lengths on the host, which no CUDA graph can capture."""


@dataclass(frozen=True)
class ModelDescription:
    """Everything that `specdec info` says."""

    name: str
    architecture: str
    supported: bool | None
    """None where only running the model with its weights would tell."""
    why_not: str | None
    num_parameters: int | None
    dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int | None
    rope_types: tuple[str, ...]
    chat_template: bool
    attention: tuple[str, ...]
    """Groups of attention layers that are alike, in words."""
    cache_bytes_per_token: int | None
    notes: tuple[str, ...]


def describe_model(
    name: str,
    dtype: str = "auto",
    cache_dir: Path | str = DEFAULT_CACHE,
    on_progress: OnProgress = lambda what, done, total: None,
    check_hashes: bool = False,
) -> ModelDescription:
    """Describe a model by its configuration; the arguments are those of `load_model`.

    Raises `ModelUnavailable` where not even the configuration can be had.
    """
    weight_type = choose("dtype", dtype, dict(DTYPES))
    source = find_source(name, cache_dir, on_progress, check_hashes)
    try:
        config = AutoConfig.from_pretrained(source.location, gguf_file=source.gguf_file, local_files_only=source.local)
    except Exception as failure:  # broken files raise whatever their parser happens to trip over
        raise ModelUnavailable(f"model={name!r} cannot be read: {first_sentence(failure)}") from failure
    text = config.get_text_config()
    stored = weight_type if isinstance(weight_type, torch.dtype) else text.dtype or config.dtype or torch.float32
    ropes = rope_types(text)
    profile, num_parameters, supported, why_not = look_at(copy.deepcopy(config))
    return ModelDescription(
        name=name,
        architecture=" ".join(config.architectures or [config.model_type]),
        supported=supported,
        why_not=why_not,
        num_parameters=num_parameters,
        dtype=str(stored).removeprefix("torch."),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_length=getattr(text, "max_position_embeddings", None),
        rope_types=ropes,
        chat_template=has_chat_template(source),
        attention=describe_attention(profile) if profile else (),
        cache_bytes_per_token=cache_bytes(profile, stored) if profile else None,
        notes=tuple(
            f"rope type {rope!r} reads lengths on the host: it runs without CUDA graphs"
            for rope in ropes
            if rope in HOST_SIDE_ROPE
        ),
    )


def look_at(config: PreTrainedConfig) -> tuple[ModelProfile | None, int | None, bool | None, str | None]:
    """Run the model over one token on the meta device: its profile, its size, whether it can be driven, and why not.

    Changes `config` where its model would read numbers off tensors, which a meta tensor does not have.
    """
    config.pad_token_id = None  # transformers looks for padding among the ids
    for setting in rope_settings(config.get_text_config()):
        if setting["rope_type"] in HOST_SIDE_ROPE:
            setting["rope_type"] = "default"
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except ValueError as failure:
        return None, None, False, first_sentence(failure)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    try:
        return HFTarget(model).profile, num_parameters, True, None
    except UnsupportedError as failure:
        return None, num_parameters, False, str(failure)
    except (RuntimeError, NotImplementedError) as failure:
        return None, num_parameters, None, f"its code does not run without weights ({first_sentence(failure)})"


def describe_attention(profile: ModelProfile) -> tuple[str, ...]:
    """Groups of equal layers: how many, heads, head size, and what they ask of attention."""
    kinds = Counter(
        f"{shape.num_kv_heads} KV heads of {shape.k_size}{describe_rules(rules)}"
        for shape, rules in zip(profile.layers, profile.rules, strict=True)
    )
    return tuple(f"{count} layers: {kind}" for kind, count in kinds.items())


def describe_rules(rules: AttentionRules) -> str:
    """What a layer asks of attention beyond causality."""
    window = f", sliding window {rules.sliding_window}" if rules.sliding_window else ""
    softcap = f", soft cap {rules.softcap:g}" if rules.softcap else ""
    sinks = ", attention sinks" if rules.sinks is not None else ""
    return window + softcap + sinks


def cache_bytes(profile: ModelProfile, dtype: torch.dtype) -> int:
    """Bytes of one token's K and V in all layers, stored in `dtype`."""
    return sum(layer.num_kv_heads * (layer.k_size + layer.v_size) for layer in profile.layers) * dtype.itemsize


def rope_settings(config: PreTrainedConfig) -> list[dict]:
    """The rope settings of the configuration: one, one for each kind of layer, or none where positions are others."""
    found = getattr(config, "rope_parameters", None) or {}
    return [found] if "rope_type" in found else [value for value in found.values() if isinstance(value, dict)]


def rope_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """Rope types in use, each once."""
    return tuple(dict.fromkeys(setting["rope_type"] for setting in rope_settings(config)))


def has_chat_template(source: Source) -> bool:
    """Whether the model's tokenizer can lay out a chat.  Raises `ModelUnavailable` where there is no tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.location, gguf_file=source.gguf_file, local_files_only=source.local
        )
    except Exception as failure:  # see describe_model
        raise ModelUnavailable(
            f"the tokenizer in {source.location} cannot be read: {first_sentence(failure)}"
        ) from failure
    return tokenizer.chat_template is not None
