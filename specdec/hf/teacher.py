"""`TeacherModel`: whole rows of text through the target at once: the features and logits that a head learns from."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from specdec.errors import ConfigError, UnsupportedError
from specdec.hf.target import HFTarget, decoder_layers, unique_configs

NAME = "specdec_teacher"


@final
class TeacherModel:
    """Runs unpadded rows of up to `length` tokens and returns the taps and the logits of every token.

    `compiled` fuses each decoder layer with torch.compile (one compilation for all layers).  The model's own methods
    are left as they were after each call.  Raises `UnsupportedError` as `check_plain_attention` does.
    """

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...], length: int, compiled: bool = False) -> None:
        check_plain_attention(model, length)
        AttentionInterface.register(NAME, _attend)
        self._model, self._taps, self._configs = model, taps, unique_configs(model)
        self._layers = decoder_layers(model)
        for tap in taps:
            if not -1 <= tap < len(self._layers):
                raise ConfigError(f"tap={tap}; accepted: -1 (after the final norm) to {len(self._layers) - 1}")
        # The bound method is compiled rather than the module, so that the hooks of the taps stay outside.
        self._forwards = [torch.compile(layer.forward, dynamic=False) for layer in self._layers] if compiled else None

    @torch.no_grad()
    def __call__(self, tokens: Int[Tensor, "b t"]) -> tuple[tuple[Float[Tensor, "b t f"], ...], Float[Tensor, "b t v"]]:
        seen: dict[int, Tensor] = {}

        def keep(tap: int):
            def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
                seen[tap] = args[0] if args else kwargs["hidden_states"]

            return hook

        modules = {tap: self._model.get_output_embeddings() if tap == -1 else self._layers[tap] for tap in self._taps}
        hooks = [module.register_forward_pre_hook(keep(tap), with_kwargs=True) for tap, module in modules.items()]
        before = [config._attn_implementation_internal for config in self._configs]
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        try:
            for config in self._configs:
                config._attn_implementation_internal = NAME
            self._swap_forwards()
            logits = self._model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        finally:
            self._restore_forwards()
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name
            for handle in hooks:
                handle.remove()
        return tuple(seen[tap] for tap in self._taps), logits

    def _swap_forwards(self) -> None:
        for layer, forward in zip(self._layers, self._forwards or (), strict=False):
            layer.forward = forward

    def _restore_forwards(self) -> None:
        for layer in self._layers if self._forwards else ():
            layer.__dict__.pop("forward", None)


def check_plain_attention(model: PreTrainedModel, length: int) -> None:
    """Raise `UnsupportedError` where the model's attention is more than plain causal attention over `length` tokens."""
    for rules in HFTarget(model).profile.rules:
        if rules.softcap is not None or rules.sinks is not None:
            raise UnsupportedError(
                f"{type(model).__name__}: training knows no soft-capped attention or attention sinks"
            )
        if rules.sliding_window is not None and rules.sliding_window < length:
            raise UnsupportedError(
                f"{type(model).__name__} has a sliding window of {rules.sliding_window}, rows have {length} tokens; "
                "use shorter rows"
            )


def _attend(
    module: nn.Module,
    query: Float[Tensor, "b heads t d"],
    key: Float[Tensor, "b h t d"],
    value: Float[Tensor, "b h t d"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "b t heads d"], None]:
    """Causal attention without a mask, so that the flash kernel takes it."""
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None
