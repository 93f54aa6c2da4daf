"""`specdec.generate`: the arguments and returns of `model.generate`, decoded speculatively."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec.config import SpecConfig
from specdec.decoder import SpeculativeDecoder
from specdec.draft.base import Drafter
from specdec.errors import ConfigError, UnsupportedError, choose
from specdec.hf.drafters import lend_prefixes, make_drafter
from specdec.hf.linear import fast_linears
from specdec.hf.processors import hold_rows, looks_at_batch, scores_only, temperature_of
from specdec.hf.streaming import StreamRelay
from specdec.hf.target import HFTarget, check_supported
from specdec.kv.prefix import PrefixCache
from specdec.policies import VERIFIERS as VERIFIERS
from specdec.policies import WRITERS as WRITERS
from specdec.policies import MakeWriter
from specdec.sampling import GeneratorNoise, Sampler
from specdec.types import StepRecord
from specdec.verify.base import Verifier

OnStep = Callable[[StepRecord], None]


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    drafter: str | Drafter | PreTrainedModel | None = "suffix",
    drafter_options: dict[str, Any] | None = None,
    writer: str | MakeWriter = "deferred",
    verifier: str | Verifier = "eager",
    spec_config: SpecConfig | None = None,
    attention: str = "paged",
    prefix_cache: PrefixCache | None = None,
    on_step: OnStep | None = None,
    streamer: BaseStreamer | None = None,
    **kwargs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Generate as `model.generate(inputs, **kwargs)` does, token for token in fp32, in fewer forwards.

    Args:
        drafter: a name (`none`, `ngram`, `suffix`, `assistant:MODEL`, `eagle:PATH`), a `Drafter`, or a model to assist.
        drafter_options: values of the named drafter's configuration.
        writer: `deferred` (NWOR), `immediate`, `off` (or `direct`), or what makes a `KVWriter` from its cache (a
            writer class, say).
        verifier: `vectorized`, `graph`, `adaptive`, `off` (or `eager`), or a `Verifier`.
        prefix_cache: keeps K/V of this and earlier calls with the same model, so that prompts which begin like an
            earlier text (chat turns, shared instructions) run only what is new.
        on_step: called with the `StepRecord` of every step.
        kwargs: everything that `model.generate` takes, stop strings and their tokenizer included.

    Raises `UnsupportedError` for generation modes and models that are not supported, `ConfigError` for bad arguments.
    """
    check_supported(model)
    assistant = kwargs.pop("assistant_model", None)
    if assistant is not None:
        drafter = assistant
    kwargs = _with_stop_strings_as_criterion(model, kwargs)
    method = custom_generate(
        drafter=drafter,
        drafter_options=drafter_options,
        writer=writer,
        verifier=verifier,
        spec_config=spec_config,
        attention=attention,
        prefix_cache=prefix_cache,
        on_step=on_step,
        streamer=streamer,
    )
    with _stop_strings_hidden(model):
        run: Any = model.generate
        return run(inputs, custom_generate=method, streamer=streamer, **kwargs)


def custom_generate(
    *,
    drafter: str | Drafter | PreTrainedModel | None = "suffix",
    drafter_options: dict[str, Any] | None = None,
    writer: str | MakeWriter = "deferred",
    verifier: str | Verifier = "eager",
    spec_config: SpecConfig | None = None,
    attention: str = "paged",
    prefix_cache: PrefixCache | None = None,
    on_step: OnStep | None = None,
    streamer: BaseStreamer | None = None,
) -> Callable[..., GenerateDecoderOnlyOutput | Tensor]:
    """A decoding method for `model.generate(custom_generate=...)`; the arguments are those of `generate`.

    Hugging Face does not hand its streamer on to custom methods: give it here as well.
    """
    make_writer = choose("writer", writer, WRITERS) if isinstance(writer, str) else writer
    chosen = verifier if isinstance(verifier, Verifier) else choose("verifier", verifier, VERIFIERS)()

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        _refuse_unsupported_mode(generation_config)
        target = HFTarget(model, attention)
        if prefix_cache is not None and model_kwargs.get("token_type_ids") is not None:
            raise UnsupportedError("token_type_ids with a prefix_cache are not supported; pass one of them")
        mask = _take_model_inputs(target, input_ids, model_kwargs)
        drafts = make_drafter(drafter, model, **(drafter_options or {}))
        if prefix_cache is not None:
            prefix_cache.claim(model)
            lend_prefixes(drafts, prefix_cache.draft)
        decoder = SpeculativeDecoder(target, drafts, make_writer, chosen, spec_config, prefix_cache)
        request = _Request(decoder, input_ids, mask, generation_config, logits_processor, stopping_criteria)
        with fast_linears(model):
            return request.run(on_step, streamer)

    return decode


@dataclass
class _Request:
    """One call of `generate`, prepared by transformers."""

    decoder: SpeculativeDecoder
    input_ids: Tensor
    attention_mask: Tensor | None
    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList

    def run(self, on_step: OnStep | None, streamer: BaseStreamer | None) -> GenerateDecoderOnlyOutput | Tensor:
        noise = self._noise() if self.config.do_sample else None
        sampler = self._sampler(noise)
        relay = None if streamer is None else StreamRelay(streamer, sampler.pad_token)
        start = self.decoder.start(
            self.input_ids, self.attention_mask, sampler=sampler, max_length=self.config.max_length
        )
        try:
            with start as run:
                while sampler.active_rows:
                    record = self.decoder.step(run)
                    if relay is not None:
                        relay.relay(sampler.emitted, sampler.done)
                    if on_step is not None:
                        on_step(record)
        finally:
            if noise is not None:
                self._leave_rng_as_plain_decoding(noise, max(map(len, sampler.emitted)))
        if streamer is not None:
            streamer.end()
        return self._output(sampler)

    def _noise(self) -> GeneratorNoise:
        device = self.input_ids.device
        state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
        return GeneratorNoise(state, len(self.input_ids), self.decoder.target.vocab_size, device)

    def _leave_rng_as_plain_decoding(self, noise: GeneratorNoise, num_tokens: int) -> None:
        state, device = noise.state_after(num_tokens), self.input_ids.device
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)

    def _sampler(self, noise: GeneratorNoise | None) -> Sampler:
        has_eos = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        pad = self.config._pad_token_tensor
        many = len(self.input_ids) > 1
        # Without an end token, plain decoding lets rows that met another criterion run on until all have met one.
        stop_together = many and not has_eos and len(self.criteria) > 1
        wants_dict = bool(self.config.return_dict_in_generate)
        return Sampler(
            self.input_ids,
            self.processors,
            self.criteria,
            noise,
            scores_only=scores_only(self.processors),
            lockstep=stop_together or (many and looks_at_batch(self.processors, self.criteria)),
            whole_batch=many and hold_rows(self.processors, len(self.input_ids)),
            stop_together=stop_together,
            temperature=temperature_of(self.processors),
            keep_scores=wants_dict and bool(self.config.output_scores),
            keep_logits=wants_dict and bool(self.config.output_logits),
            pad_token=0 if pad is None else int(pad),
        )

    def _output(self, sampler: Sampler) -> GenerateDecoderOnlyOutput | Tensor:
        longest = max(map(len, sampler.emitted))
        rows = [tokens + [sampler.pad_token] * (longest - len(tokens)) for tokens in sampler.emitted]
        new_tokens = torch.tensor(rows, dtype=self.input_ids.dtype, device=self.input_ids.device)
        sequences = torch.cat([self.input_ids, new_tokens], dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        fields: dict[str, Any] = dict(
            sequences=sequences,
            scores=_by_index(sampler.scores) if self.config.output_scores else None,
            logits=_by_index(sampler.logits) if self.config.output_logits else None,
        )
        return GenerateDecoderOnlyOutput(**fields)


def _by_index(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Per-row records as one `[B v]` tensor per generated index; rows that ended hold zeros."""
    longest = max(map(len, rows))
    blank = torch.zeros_like(next(row[0] for row in rows if row))
    return tuple(torch.stack([row[i] if i < len(row) else blank for row in rows]) for i in range(longest))


def _refuse_unsupported_mode(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        hint = "choose a drafter instead" if mode == GenerationMode.ASSISTED_GENERATION else "use model.generate()"
        raise UnsupportedError(
            f"generation mode {mode.value!r} is not supported; accepted: greedy_search, sample; {hint}"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise UnsupportedError(f"{name}=True is not supported; use model.generate()")


def _take_model_inputs(target: HFTarget, input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor | None:
    """Return the attention mask, bind per-token inputs to the target, and refuse by name what would be ignored."""
    mask = model_kwargs.pop("attention_mask", None)
    for name in ("use_cache", "logits_to_keep"):
        model_kwargs.pop(name, None)
    for name in ("cache", "past_key_values"):
        given = model_kwargs.pop(name, None)
        if given is not None and given.get_seq_length() > 0:
            raise UnsupportedError(f"{name} with tokens in it is not supported; pass the whole prompt as input_ids")
    _check_positions(model_kwargs.pop("position_ids", None), input_ids, mask)
    token_types = model_kwargs.pop("token_type_ids", None)
    for name, value in model_kwargs.items():
        if value is not None:
            raise UnsupportedError(f"{name} is not supported; accepted model inputs: attention_mask, token_type_ids")
    has_windows = any(rules.sliding_window is not None for rules in target.profile.rules)
    if mask is not None and has_windows and bool((mask.diff(dim=1) < 0).any()):
        raise UnsupportedError(
            "attention_mask with masked tokens between visible ones is not supported for sliding-window models"
        )
    if token_types is not None:
        visible = torch.ones_like(input_ids) if mask is None else mask
        rows = zip(token_types.to(target.device), visible.to(target.device).bool(), strict=True)
        target.bind_token_inputs({"token_type_ids": [types[seen] for types, seen in rows]})
    return mask


def _check_positions(position_ids: Tensor | None, input_ids: Tensor, mask: Tensor | None) -> None:
    if position_ids is None:
        return
    visible = torch.ones_like(input_ids) if mask is None else mask.long()
    expected = (visible.cumsum(-1) - 1).masked_fill(visible == 0, 0)
    if position_ids.dim() != 2 or not bool(((position_ids == expected) | (visible == 0)).all()):
        raise UnsupportedError("position_ids other than those that follow from attention_mask are not supported")


def _with_stop_strings_as_criterion(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Turn stop strings into a stopping criterion: transformers drops the tokenizer on its way to custom methods."""
    kwargs = dict(kwargs)
    tokenizer = kwargs.pop("tokenizer", None)
    config = kwargs.get("generation_config")
    stop_strings = kwargs.pop("stop_strings", None)
    for source in (config, model.generation_config):
        stop_strings = stop_strings or (source.stop_strings if source is not None else None)
    if stop_strings is None:
        return kwargs
    if tokenizer is None:
        raise ConfigError("stop_strings need the model's tokenizer; pass tokenizer=...")
    if config is not None and config.stop_strings is not None:
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].stop_strings = None
    criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    return {**kwargs, "stopping_criteria": criteria}


@contextmanager
def _stop_strings_hidden(model: PreTrainedModel) -> Iterator[None]:
    """Hide the stop strings of the model's own generation config, which are a criterion by now, from transformers."""
    own = model.generation_config
    if own is None or own.stop_strings is None:
        yield
        return
    model.generation_config = copy.deepcopy(own)
    model.generation_config.stop_strings = None
    try:
        yield
    finally:
        model.generation_config = own
