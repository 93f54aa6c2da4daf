"""A smaller model drafts for a larger one, through the whole of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import PagedKVCache, StepRecord
from specdec.draft.assistant import AssistantDrafter
from specdec.draft.base import DraftContext, Drafter
from specdec.draft.hybrid import HybridDrafter
from specdec.draft.suffix import SuffixDrafter
from specdec.hf.target import HFTarget
from specdec.kv.deferred import DeferredWriter
from specdec.types import Draft, Verdict, Window
from tests.models import FAMILIES, VOCAB, tiny_gpt2, tiny_llama
from tests.systems import GREEDY, SAMPLED, plain, prompts, speculative


def assistant(model: PreTrainedModel, **options: Any) -> AssistantDrafter:
    def make_store(layers, num_rows: int, max_length: int):
        cache = PagedKVCache(layers, num_rows, growable=True)
        return cache, DeferredWriter(cache)

    target = HFTarget(model)
    return AssistantDrafter.of(target, VOCAB, make_store, **options)


def relative_of(make: Callable[..., PreTrainedModel], noise: float) -> PreTrainedModel:
    """The same model with slightly other weights: it often agrees, and not always."""
    model = make()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return model


def run(model: PreTrainedModel, inputs: dict[str, Tensor], drafter: Drafter, **options: Any) -> list[StepRecord]:
    """Check that the text is that of plain decoding, and return how it came."""
    records: list[StepRecord] = []
    output = speculative(model, inputs, drafter, on_step=records.append, **options)
    assert output.tolist() == plain(model, inputs, **options).tolist()
    return records


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_a_model_drafting_for_itself_is_always_accepted(family: str, num_rows: int, mode: dict[str, Any]) -> None:
    model, inputs = FAMILIES[family](), prompts(num_rows, VOCAB)
    mode = mode | ({"temperature": 0.8, "top_k": 0, "top_p": 1.0} if mode["do_sample"] else {})
    drafter = assistant(FAMILIES[family](), num_drafts=4)
    records = run(model, inputs, drafter, max_new_tokens=40, **mode)
    assert all(record.num_accepted == record.num_drafted for record in records)
    assert len(records) == 8


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_an_imperfect_assistant_changes_the_speed_alone(num_rows: int, mode: dict[str, Any]) -> None:
    model, inputs = tiny_llama(), prompts(num_rows, VOCAB)
    small = relative_of(tiny_llama, 0.02)
    for drafter in (assistant(small), HybridDrafter(assistant(small), SuffixDrafter())):
        records = run(model, inputs, drafter, max_new_tokens=40, **mode)
        accepted, drafted = (
            sum(getattr(record, name) for record in records) for name in ("num_accepted", "num_drafted")
        )
        assert 0 < accepted < drafted


def test_beyond_the_assistants_context_decoding_is_plain() -> None:
    model, inputs = tiny_llama(), prompts(1, VOCAB, length=20)
    small = tiny_gpt2(n_positions=32)
    records = run(model, inputs, assistant(small), max_new_tokens=40)
    lengths = [20 + sum(len(record.emitted[0]) for record in records[:i]) for i in range(len(records))]
    assert any(record.num_drafted for record in records)
    assert all(record.num_drafted == 0 for record, length in zip(records, lengths, strict=True) if length > 32)


@pytest.mark.parametrize("own", [VOCAB - 8, VOCAB + 8])
@pytest.mark.parametrize("mode", [GREEDY, SAMPLED])
def test_a_padded_vocabulary_drafts_common_ids(own: int, mode: dict[str, Any]) -> None:
    model, inputs = tiny_llama(), prompts(3, VOCAB)
    drafter = assistant(tiny_llama(vocab_size=own), common_vocabulary=True)
    records = run(model, inputs, drafter, max_new_tokens=30, **mode)
    assert sum(record.num_drafted for record in records) > 0


@final
class Deaf(Drafter):
    """An assistant that is not told the target's noise, and so drafts what it finds most probable."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        self._drafter.begin(prompts, max_length)

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        self._drafter.fork(source, copies)

    def propose(self, context: DraftContext) -> Draft:
        return self._drafter.propose(replace(context, noise=None))

    def observe(self, window: Window, features: tuple[Tensor, ...], verdict: Verdict) -> None: ...

    def end(self) -> None:
        self._drafter.end()


def test_drafts_picked_with_the_targets_noise_are_accepted_more_often() -> None:
    model, inputs = tiny_llama(), prompts(4, VOCAB)
    small = relative_of(tiny_llama, 0.02)
    options = {"do_sample": True, "temperature": 2.5, "top_k": 0, "top_p": 1.0, "max_new_tokens": 60}

    def accepted(drafter: Drafter) -> float:
        records = run(model, inputs, drafter, **options)
        return sum(record.num_accepted for record in records) / sum(record.num_drafted for record in records)

    assert accepted(assistant(small)) > 1.5 * accepted(Deaf(assistant(small)))
