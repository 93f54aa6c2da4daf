"""What the files of a draft head say: which format they are in, and what `EagleHeadConfig` that means.

Known formats: SafeAILab EAGLE-1/2 and EAGLE-3, SpecForge, speculators `eagle3`, and EAGLE-3 heads saved with
`layers.0.*` names (DeepSpec, NeMo).  What checkpoints are known to leave out of their configuration is read off the
names and shapes of their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.draft.eagle_config import EagleHeadConfig
from specdec.draft.rope import RopeConfig
from specdec.errors import CheckpointError, UnsupportedError

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

REFUSED = ("dflash2", "dflash", "dspark", "peagle", "medusa", "hydra", "mtp")
"""Other kinds of draft models, longer names first, as they appear in type and architecture names."""
PREFIXES = ("module.", "draft_model.", "model.")
IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq")
"""Tensors that some trainers save beside the head and that it does not need."""


@dataclass(frozen=True)
class TargetShape:
    """What a head must know of its target, or fit."""

    hidden_size: int
    vocab_size: int
    num_layers: int


def canonical_names(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors under the names of the speculators format, which are those of `EagleHead`."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        canonical = name
        for prefix in PREFIXES:
            canonical = canonical.removeprefix(prefix)
        if canonical.startswith("midlayer."):
            canonical = "layers.0." + canonical.removeprefix("midlayer.")
        if canonical in renamed:
            raise CheckpointError(f"{name}: expected one tensor for {canonical}, found two")
        if canonical not in IGNORED:
            renamed[canonical] = tensor
    return renamed


def detect(config: Config, tensors: Tensors) -> str:
    """The format of a checkpoint (`speculators`, `specforge`, `eagle3`, `eagle1`); `tensors` bear their original names.

    Raises `UnsupportedError` for other kinds of draft models, by their name, and `CheckpointError` for anything else.
    """
    refuse_others(config, tensors)
    kind = config.get("speculators_model_type")
    if kind is not None and kind != "eagle3":
        raise UnsupportedError(f"speculators_model_type={kind!r} is not supported; accepted: eagle3")
    names = canonical_names(tensors)
    if "fc.weight" not in names or "layers.0.self_attn.q_proj.weight" not in names:
        missing = [name for name in ("fc.weight", "layers.0.self_attn.q_proj.weight") if name not in names]
        found = ", ".join(sorted(tensors)) or "nothing"
        raise CheckpointError(f"no EAGLE head: expected {', '.join(missing)}, found {found}")
    if kind == "eagle3":
        return "speculators"
    if "layers.0.hidden_norm.weight" not in names and "norm.weight" not in names:
        return "eagle1"
    is_specforge = any("ForCausalLMEagle3" in name for name in config.get("architectures") or ())
    return "specforge" if is_specforge else "eagle3"


def refuse_others(config: Config, tensors: Tensors) -> None:
    """Raise `UnsupportedError` for draft models that are no EAGLE heads, naming what they are."""
    said = [str(config.get(key, "")) for key in ("speculators_model_type", "model_type", "algorithm")]
    said += [str(name) for name in config.get("architectures") or ()]
    said += [key for key in config if key.endswith(("_config", "_num_heads", "_num_layers", "_head_config"))]
    said += [name.split(".")[0] for name in tensors]
    said += ["mtp" for key in config if key == "num_nextn_predict_layers"]
    for kind in REFUSED:
        for word in said:
            if kind in word.lower().replace("-", "").replace("_", ""):
                raise UnsupportedError(f"a {kind} draft model (it says {word!r}); accepted: EAGLE-1, 2 and 3 heads")
    # Medusa's own files are bare: a list of residual blocks and a linear layer per head.
    if tensors and all(name.split(".")[0].isdigit() for name in tensors):
        raise UnsupportedError(
            f"this is a medusa draft model (tensor {min(tensors)}); accepted: EAGLE-1, 2 and 3 heads"
        )


def head_config(kind: str, config: Config, tensors: Tensors, target: TargetShape | None) -> EagleHeadConfig:
    """The head's configuration; `tensors` bear canonical names.

    Raises `CheckpointError` or `UnsupportedError` naming the key.
    """
    layer = config.get("transformer_layer_config", config) if kind == "speculators" else config
    if layer.get("num_hidden_layers", 1) != 1:
        raise UnsupportedError(f"num_hidden_layers={layer['num_hidden_layers']}; accepted: 1")
    values = layer_values(layer, tensors)
    if kind == "eagle1":
        bias = config.get("bias")
        fc_bias = "fc.bias" in tensors if bias is None else bool(bias)
        return EagleHeadConfig(
            kind="eagle1",
            taps=(-1,),
            fc_bias=fc_bias,
            final_norm=False,
            tie_lm_head="lm_head.weight" not in tensors,
            **values,
        )
    draft_vocab_size = config.get("draft_vocab_size") or layer.get("draft_vocab_size")
    if draft_vocab_size is None and "lm_head.weight" in tensors:
        draft_vocab_size = tensors["lm_head.weight"].shape[0]
    if draft_vocab_size is None and "d2t" in tensors:
        draft_vocab_size = len(tensors["d2t"])
    return EagleHeadConfig(
        kind="eagle3",
        taps=taps_of(config, target),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=config.get("target_hidden_size"),
        fc_bias="fc.bias" in tensors,
        # In the speculators format a head without lm_head uses its target's.
        tie_lm_head=kind == "speculators" and "lm_head.weight" not in tensors,
        **norms_of(kind, config, tensors),
        **values,
    )


def norms_of(kind: str, config: Config, tensors: Tensors) -> dict[str, Any]:
    """Which norms stand where; each project has its own defaults, and means its own by `norm_output`."""
    if kind == "speculators":
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return {name: bool(config.get(name, False)) for name in names}
    norms = {
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "norm_before_fc": "input_norm.weight" in tensors or bool(config.get("norm_before_fc", False)),
        "fc_norm": "fc_norm.0.weight" in tensors or bool(config.get("fc_norm") or config.get("use_aux_norm")),
    }
    if kind == "specforge":
        # There it says whether the norm stands before lm_head; the hidden state fed back is always the one before it.
        return norms | {"final_norm": bool(config.get("norm_output", True)), "norm_output": False}
    return norms | {"norm_output": bool(config.get("norm_output", False))}


def taps_of(config: Config, target: TargetShape | None) -> tuple[int, ...]:
    """Target layers whose inputs the head reads.

    speculators, vLLM and SafeAILab number layer inputs; SGLang (`eagle_config`), DeepSpec and AngelSlim outputs.
    """
    ids, offset, key = None, 0, ""
    for source, name, shift in (
        (config, "eagle_aux_hidden_state_layer_ids", 0),
        (config.get("eagle_config") or {}, "eagle_aux_hidden_state_layer_ids", 1),
        (config, "target_layer_ids", 1),
        (config, "aux_hidden_states_layer_ids", 1),
    ):
        if ids is None and source.get(name):
            ids, offset, key = source[name], shift, name
    num_layers = target.num_layers if target is not None else config.get("num_target_layers")
    if ids is None:
        if num_layers is None:
            raise CheckpointError(
                "config.json: expected eagle_aux_hidden_state_layer_ids or target_layer_ids, found neither; say which "
                "target the head is for, so that the usual layers 2, n/2 and n - 3 of its n can be taken"
            )
        return (2, num_layers // 2, num_layers - 3)
    taps = tuple(int(i) + offset for i in ids)
    if num_layers is not None and not all(0 <= tap < num_layers for tap in taps):
        raise CheckpointError(
            f"config.json {key}: expected layers of a target of {num_layers} layers, found {list(ids)}"
        )
    return taps


def layer_values(layer: Config, tensors: Tensors) -> dict[str, Any]:
    """The part of the configuration that is a Llama or Qwen 3 layer's."""
    for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        if key not in layer:
            raise CheckpointError(f"config.json: expected the key {key}, found {', '.join(sorted(layer))}")
    heads = layer["num_attention_heads"]
    return {
        "hidden_size": layer["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": layer.get("num_key_value_heads") or heads,
        "head_dim": layer.get("head_dim") or layer["hidden_size"] // heads,
        "intermediate_size": layer["intermediate_size"],
        "vocab_size": layer["vocab_size"],
        "rope": rope_of(layer),
        "rms_norm_eps": layer.get("rms_norm_eps", 1e-6),
        "activation": layer.get("hidden_act") or "silu",
        "max_positions": layer.get("max_position_embeddings"),
        "sliding_window": sliding_window_of(layer),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "output_bias": "layers.0.self_attn.o_proj.bias" in tensors,
        "mlp_bias": "layers.0.mlp.gate_proj.bias" in tensors,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "own_embeddings": "embed_tokens.weight" in tensors,
    }


def rope_of(layer: Config) -> RopeConfig:
    """The head's own rotation; without `rope_theta` the base is 10000, whatever the target's is."""
    settings = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    for nested in ("sliding_attention", "full_attention"):
        settings = settings.get(nested) or settings
    theta = settings.get("rope_theta") or layer.get("rope_theta") or 10000.0
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if (layer.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedError(f"partial_rotary_factor={layer['partial_rotary_factor']}; accepted: 1")
    scaling = {name: value for name, value in settings.items() if name not in ("rope_type", "type", "rope_theta")}
    return RopeConfig(float(theta), kind, scaling if kind != "default" else {})


def sliding_window_of(layer: Config) -> int | None:
    """The window, where the layer really uses it: copies of a target's configuration often only name one."""
    kinds = layer.get("layer_types")
    used = kinds[0] == "sliding_attention" if kinds else bool(layer.get("use_sliding_window", False))
    return layer.get("sliding_window") if used else None
