"""`FusedTarget` over a Hugging Face model: weights by reference, rotation as a table, and a trial that they fit."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import UnsupportedError
from specdec.graphs.fused_target import FusedTarget
from specdec.graphs.routes import Tilings
from specdec.graphs.weights import DecoderWeights, LayerWeights, joined
from specdec.hf.target import HFTarget
from specdec.kernels.skinny_linear import Rotation
from specdec.kv.deferred import DeferredWriter
from specdec.kv.pages import PagedKVCache
from specdec.types import Verdict, Window

MODEL_TYPES = ("llama", "mistral", "qwen2")
"""Decoders of RMSNorm, rotary attention and a SiLU-gated MLP, without anything between."""

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}
"""Largest relative difference of logits between the fused forward and the model's own.  In bf16 it only finds gross
mismatch: the roundings of 32 layers of random weights alone amount to 0.06."""

PROBE = 4


def fused_target(
    model: PreTrainedModel,
    max_positions: int = 32768,
    tilings: Tilings | None = None,
    pdl: bool | None = None,
    merge: bool = False,
) -> FusedTarget:
    """A fused target for a model of a known family, tried against the model's own forward before it is returned.

    Args:
        max_positions: bounds the rotation table.
        tilings: see `FusedTarget`.
        pdl: see `FusedTarget`.
        merge: move Q, K and V weights of each layer, and gate and up, next to each other, which makes them one product;
            the model's parameters become views of them, with the same values.

    Raises `UnsupportedError`, naming what does not fit.
    """
    own = HFTarget(model)
    if merge:
        merge_projections(model)
    target = FusedTarget(_weights(model, own, max_positions), tilings, pdl)
    _check_same_logits(own, target)
    return target


@torch.no_grad()
def merge_projections(model: PreTrainedModel) -> None:
    """Make the weights that read the same input lie one behind the other; mutates where the parameters lie.

    One group of one layer is copied at a time, so that no more memory than that is needed on top.
    """
    for layer in cast(Any, model.base_model).layers:
        attention, mlp = layer.self_attn, layer.mlp
        for modules in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            weights = tuple(module.weight for module in modules)
            if joined(weights) is not None:
                continue
            whole = torch.cat(weights)
            for module, part in zip(modules, whole.split([len(weight) for weight in weights]), strict=True):
                module.weight.data = part


def _weights(model: PreTrainedModel, own: HFTarget, max_positions: int) -> DecoderWeights:
    config, inner = model.config, cast(Any, model.base_model)
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedError(f"fused forward: model_type={config.model_type!r}; accepted: {', '.join(MODEL_TYPES)}")
    if config.hidden_act != "silu":
        raise UnsupportedError(f"fused forward: hidden_act={config.hidden_act!r}; accepted: 'silu'")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise UnsupportedError("fused forward: the model lies on several devices; accepted: one")
    layers = tuple(_layer(layer, rules) for layer, rules in zip(inner.layers, own.profile.rules, strict=True))
    return DecoderWeights(
        embedding=inner.embed_tokens.weight.detach(),
        layers=layers,
        final_norm=inner.norm.weight.detach(),
        lm_head=_plain(model.get_output_embeddings(), "lm_head"),
        eps=inner.norm.variance_epsilon,
        rotation=_rotation(inner.rotary_emb, model, min(max_positions, own.max_length or max_positions)),
    )


def _layer(layer: Any, rules: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [p.bias for p in projections if p.bias is not None]
    if len(biases) not in (0, 3):
        raise UnsupportedError("fused forward: biases on some of q_proj, k_proj, v_proj; accepted: on all or none")
    if rules.softcap is not None or rules.sinks is not None:
        raise UnsupportedError("fused forward: soft-capping or attention sinks; accepted: neither")
    q, k, v = (p.weight.detach() for p in projections)
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=(q, k, v),
        qkv_biases=(biases[0].detach(), biases[1].detach(), biases[2].detach()) if biases else None,
        output=_plain(attention.o_proj, "o_proj"),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate=_plain(mlp.gate_proj, "gate_proj"),
        up=_plain(mlp.up_proj, "up_proj"),
        down=_plain(mlp.down_proj, "down_proj"),
        rules=rules,
    )


def _plain(module: nn.Module | None, name: str) -> Tensor:
    """The weight of a linear layer without bias."""
    bias: Tensor | None = getattr(module, "bias", None)
    if not isinstance(module, nn.Linear) or bias is not None or not module.weight.is_contiguous():
        raise UnsupportedError(f"fused forward: {name} is {module}; accepted: nn.Linear without bias, contiguous")
    return module.weight.detach()


def _rotation(rotary: Any, model: PreTrainedModel, positions: int) -> Rotation:
    """The model's own cosines and sines of every position, as it rounds them."""
    kind = getattr(rotary, "rope_type", "default")
    if kind in LENGTH_DEPENDENT_ROPE:
        raise UnsupportedError(f"fused forward: rope type {kind!r} depends on the length; accepted: the others")
    steps = torch.arange(positions, device=model.device)[None]
    with torch.no_grad():
        cos, sin = rotary(torch.zeros(1, dtype=model.dtype, device=model.device), steps)
    half = cos.shape[-1] // 2
    return Rotation(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())


@torch.no_grad()
def _check_same_logits(own: HFTarget, target: FusedTarget) -> None:
    """Raise `UnsupportedError` unless both give the same logits on a few tokens behind a committed prefix."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (2, PROBE), generator=generator).tolist()
    outputs = []
    for candidate in (own, target):
        cache = PagedKVCache(candidate.layers, 4)
        row = cache.add_row()
        writer = DeferredWriter(cache)
        prompt = Window.chain([tokens[0]], (row,), (0,), own.device)
        writer.begin(prompt)
        candidate.forward(prompt, writer, need_logits=False)
        writer.commit(Verdict.keep_all(prompt, torch.zeros(1, dtype=torch.long, device=own.device)))
        window = Window.chain([tokens[1]], (row,), (PROBE,), own.device)
        writer.begin(window)
        logits = candidate.forward(window, writer).logits
        assert logits is not None
        outputs.append(logits.float())
        writer.abort()
    difference = float((outputs[0] - outputs[1]).norm() / outputs[0].norm())
    tolerance = TOLERANCE[target.layers[0].dtype]
    if not difference <= tolerance:
        raise UnsupportedError(
            f"fused forward: logits differ from the model's own by {difference:.1e}; accepted: at most {tolerance:.0e}"
        )
