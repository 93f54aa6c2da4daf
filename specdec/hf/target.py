"""`HFTarget`: drives a Hugging Face causal language model over windows, without forked modelling code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.attention.reference import AttentionRules
from specdec.errors import ConfigError, UnsupportedError, choose
from specdec.hf.attention import ATTENTION, STEP_ARGUMENT, StepContext, attention_switched, register_attention
from specdec.kv.writer import KVStage
from specdec.target import LayerShape, Target, TargetOutput
from specdec.types import KVView, PrefixLayout, Window

RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "ssm")


@dataclass(frozen=True)
class ModelProfile:
    """What one forward showed of a model: its cache rows and what its layers ask of attention."""

    layers: tuple[LayerShape, ...]
    rules: tuple[AttentionRules, ...]
    layer_numbers: dict[int, int]
    vocab_size: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K/V in all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)


@final
class HFTarget(Target):
    """A Hugging Face causal language model as a `Target`.

    Raises `UnsupportedError`, naming the feature, for models that cannot be driven this way.  The first target of a
    model runs it
    over one token to see its layers; the result stays with the model.
    """

    def __init__(self, model: PreTrainedModel, attention: str = "paged") -> None:
        check_supported(model)
        register_attention()
        self.model = model
        self._attend = choose("attention", attention, ATTENTION)
        self._configs = unique_configs(model)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._takes_position_ids = "position_ids" in inspect.signature(model.forward).parameters
        self._token_inputs: dict[str, tuple[Tensor, Tensor]] = {}
        self.profile = self._look_at_model()

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return self.profile.layers

    @property
    def vocab_size(self) -> int:
        return self.profile.vocab_size

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def max_length(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def bind_token_inputs(self, inputs: dict[str, Sequence[Int[Tensor, " t"]]]) -> None:
        """Pass further per-token inputs (`token_type_ids`) on to the model: one tensor per batch row, covering its
        prompt.

        Tokens behind the prompt get the prompt's last value, as in `model.generate`.
        """
        self._token_inputs = {}
        for name, rows in inputs.items():
            lengths = torch.tensor([len(row) for row in rows], device=self.device)
            self._token_inputs[name] = (nn.utils.rnn.pad_sequence(list(rows), batch_first=True), lengths)

    def forward(
        self, window: Window, writer: KVStage, taps: tuple[int, ...] = (), need_logits: bool = True
    ) -> TargetOutput:
        context = StepContext(window, writer, self._attend, self.profile.layer_numbers)
        with attention_switched(self._configs), self._tapped(taps) as features:
            logits = self._call(window, context, need_logits)
        return TargetOutput(logits if need_logits else None, tuple(features[tap] for tap in taps))

    def _call(self, window: Window, context: StepContext, need_logits: bool = True) -> Float[Tensor, "b w v"]:
        arguments: dict[str, object] = {"input_ids": window.tokens, "use_cache": False, STEP_ARGUMENT: context}
        if self._takes_position_ids:
            arguments["position_ids"] = window.positions
        if self._takes_logits_to_keep and not need_logits:
            arguments["logits_to_keep"] = 1
        for name, (values, lengths) in self._token_inputs.items():
            rows = list(window.rows)
            places = torch.minimum(window.positions, lengths[rows][:, None] - 1)
            arguments[name] = values[rows].gather(1, places)
        return self.model(**arguments).logits

    @contextmanager
    def _tapped(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        seen: dict[int, Tensor] = {}

        def keep(tap: int):
            def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
                seen[tap] = args[0] if args else kwargs["hidden_states"]

            return hook

        def keep_output(module: nn.Module, args: tuple, output: Any) -> None:
            seen[-1] = output[0]

        layers: Sequence[nn.Module] = list(decoder_layers(self.model)) if taps else []
        for tap in taps:
            if not -1 <= tap < len(layers):
                raise ConfigError(f"tap={tap}; accepted: -1 (after the final norm) to {len(layers) - 1} (layer inputs)")
        inner = {tap: layers[tap] for tap in taps if tap >= 0}
        handles = [module.register_forward_pre_hook(keep(tap), with_kwargs=True) for tap, module in inner.items()]
        if -1 in taps:
            # Not what lm_head is given, since a prefill gives it the last position only.
            if self.model.base_model is self.model:
                raise UnsupportedError(f"{type(self.model).__name__} has no inner model to tap its final state from")
            handles.append(self.model.base_model.register_forward_hook(keep_output))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def _look_at_model(self) -> ModelProfile:
        known = self.model.__dict__.get("_specdec_profile")
        if known is not None and known[0] == (self.model.dtype, self.model.device):
            return known[1]
        device = self.model.device
        window = Window.chain([[0]], (0,), (0,), device)
        writer = _ShapeRecorder(device)
        context = StepContext(window, writer, ATTENTION["reference"], {})
        with attention_switched(self._configs):
            logits = self._call(window, context)
        if not writer.shapes:
            raise UnsupportedError(
                f"{type(self.model).__name__} never called its attention function; models whose layers do not go "
                "through transformers' AttentionInterface are not supported"
            )
        order = sorted(writer.shapes)
        profile = ModelProfile(
            layers=tuple(writer.shapes[idx] for idx in order),
            rules=tuple(context.rules[idx] for idx in order),
            layer_numbers={idx: number for number, idx in enumerate(order)},
            vocab_size=logits.shape[-1],
        )
        self.model.__dict__["_specdec_profile"] = ((self.model.dtype, device), profile)
        return profile


@final
class _ShapeRecorder(KVStage):
    """Sees which layers stage what; used once per model."""

    def __init__(self, device: torch.device) -> None:
        self.shapes: dict[int, LayerShape] = {}
        none = torch.zeros(1, 0, dtype=torch.int32, device=device)
        self._prefix = PrefixLayout(none, torch.zeros(1, dtype=torch.int32, device=device), (0,), None)

    def stage(self, layer: int, k: Tensor, v: Tensor) -> KVView:
        if layer in self.shapes:
            raise UnsupportedError(f"layer {layer} attends twice in one forward, which is not supported")
        self.shapes[layer] = LayerShape(k.shape[2], k.shape[3], v.shape[3], k.dtype, k.device)
        empty_k, empty_v = k.new_zeros(1, 1, *k.shape[2:]), v.new_zeros(1, 1, *v.shape[2:])
        return KVView(empty_k, empty_v, k, v, self._prefix)


def check_supported(model: PreTrainedModel) -> None:
    """Raise `UnsupportedError`, naming the feature, where specdec cannot drive the model."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"model is a {type(model).__name__}; accepted: a transformers PreTrainedModel")
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{name} is an encoder-decoder model; accepted: decoder-only models, use model.generate()"
        )
    text = config.get_text_config()
    recurrent = [kind for kind in getattr(text, "layer_types", None) or [] if any(r in kind for r in RECURRENT_LAYERS)]
    if recurrent or getattr(model, "_is_stateful", False):
        raise UnsupportedError(
            f"{name} has recurrent layers ({', '.join(sorted(set(recurrent))) or 'stateful'}), whose state cannot be "
            f"rolled "
            "back; use model.generate()"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError(f"{name} does not support transformers' AttentionInterface; use model.generate()")
    if model.get_output_embeddings() is None:
        raise UnsupportedError(f"{name} has no language-model head; accepted: models for causal language modelling")


def unique_configs(model: PreTrainedModel) -> tuple:
    """Every configuration object that the model's modules read their attention setting from."""
    found = {id(model.config): model.config}
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return tuple(found.values())


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers.  Raises `UnsupportedError` where none is found."""
    wanted = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise UnsupportedError(f"{type(model).__name__}: no list of {wanted} decoder layers found to tap features from")
