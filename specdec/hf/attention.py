"""The attention function that Hugging Face models call in place of their own while specdec drives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from specdec.attention.fused import attend_fused
from specdec.attention.paged import attend_paged
from specdec.attention.reference import AttentionRules, attend
from specdec.errors import UnsupportedError
from specdec.kv.writer import KVStage
from specdec.types import KVView, Window

NAME = "specdec"
STEP_ARGUMENT = "specdec_step"

Attend = Callable[[Tensor, KVView, Window, AttentionRules], Tensor]

ATTENTION: dict[str, Attend] = {"reference": attend, "paged": attend_paged, "fused": attend_fused}


@dataclass
class StepContext:
    """What travels to every attention layer in the keyword arguments of `model(...)`."""

    window: Window
    writer: KVStage
    attend: Attend
    layer_numbers: dict[int, int]
    """`module.layer_idx` → layer number of the cache."""
    rules: dict[int, AttentionRules] = field(default_factory=dict)
    """Filled while running: what each `layer_idx` asked for."""


def register_attention() -> None:
    """Make the name known to transformers; without a mask function, so that models build no mask.  May be called
    often."""
    AttentionInterface.register(NAME, attention_function)


def attention_function(
    module: nn.Module,
    query: Float[Tensor, "b heads w dk"],
    key: Float[Tensor, "b h w dk"],
    value: Float[Tensor, "b h w dv"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    specdec_step: StepContext | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "b w heads dv"], None]:
    """Stage the layer's K/V with the writer and attend to what it returns.

    Raises `UnsupportedError` where the model asks for something that would be ignored.
    """
    if specdec_step is None:
        raise UnsupportedError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    if position_bias is not None:
        raise UnsupportedError(f"{type(module).__name__} uses a position bias, which is not supported")
    if attention_mask is not None:
        raise UnsupportedError(f"{type(module).__name__} builds its own attention mask, which is not supported")
    layer_idx = module.__dict__.get("layer_idx")
    if not isinstance(layer_idx, int):
        raise UnsupportedError(f"{type(module).__name__} has no layer_idx, which is not supported")
    rules = AttentionRules(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    specdec_step.rules[layer_idx] = rules
    number = specdec_step.layer_numbers.get(layer_idx, layer_idx)
    view = specdec_step.writer.stage(number, key.transpose(1, 2), value.transpose(1, 2))
    return specdec_step.attend(query, view, specdec_step.window, rules), None


@contextmanager
def attention_switched(configs: tuple[PretrainedConfig, ...]) -> Iterator[None]:
    """Let the models of these configurations use specdec's attention inside the context, and their own again after
    it."""
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        # Inference mode spares the many small operations of a forward their autograd book-keeping; a rope that writes
        # its buffers while running would leave them unusable for training.
        with torch.no_grad() if any(map(_writes_buffers, configs)) else torch.inference_mode():
            yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def _writes_buffers(config: PretrainedConfig) -> bool:
    """Whether the model's rope recomputes its buffers as the text grows."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(part.get("rope_type") for part in rope.values() if isinstance(part, dict))}
    return bool(kinds & {"dynamic", "longrope"})
