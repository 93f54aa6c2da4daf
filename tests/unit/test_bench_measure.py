"""Measurement: order of runs, clocks, identity, room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.bench.measure import BenchConfig, Measurement, RunTimes, first_difference, measure, top_2_gap
from specdec.bench.systems import HFSystem, SpecdecSystem, StreamWatch, System, Trace
from specdec.bench.workload import Question
from specdec.draft.ngram import NGramDrafter
from specdec.draft.none import NoDrafter
from specdec.draft.suffix import SuffixDrafter
from specdec.errors import ConfigError
from tests.models import byte_tokenizer, tiny_llama

QUESTIONS = [Question(1, "one", ("abcabcabc", "and more")), Question(2, "two", ("xyz",))]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(vocab_size=257)


def systems_of(model: PreTrainedModel) -> list[System]:
    return [
        HFSystem(model),
        SpecdecSystem(model, NoDrafter(), "none"),
        SpecdecSystem(model, SuffixDrafter(), "suffix"),
        SpecdecSystem(model, NGramDrafter(), "ngram", writer="direct"),
        HFSystem(model, "hf lookup 3", prompt_lookup_num_tokens=3),
    ]


@final
class Scripted(System):
    """Says given tokens, one call after the other; keeps a log of who was called."""

    def __init__(self, name: str, log: list[str], answers: Sequence[Sequence[int]] = ((1, 2, 3),)) -> None:
        self._name = name
        self._log = log
        self._answers = answers
        self._calls = 0

    @property
    def name(self) -> str:
        return self._name

    def decode(self, prompt: Tensor, seed: int, arguments: dict[str, Any]) -> Trace:
        self._log.append(self._name)
        tokens = list(self._answers[self._calls % len(self._answers)])
        self._calls += 1
        return Trace(tokens, 1.0, [(0.25, 1), (0.75, len(tokens) - 1)])


def test_every_system_runs_forwards_and_backwards_after_a_warm_up(model: PreTrainedModel) -> None:
    log: list[str] = []
    progress: list[str] = []
    systems = [Scripted(name, log) for name in ("hf", "b", "c")]
    found = list(measure(model, byte_tokenizer(), QUESTIONS, systems, on_run=progress.append))
    there_and_back = ["hf", "b", "c", "c", "b", "hf"]
    assert log == ["hf", "b", "c", *there_and_back, *there_and_back]
    assert progress == [*there_and_back, *there_and_back]
    assert [(m.question_id, m.system) for m in found] == [(q, s) for q in (1, 2) for s in ("hf", "b", "c")]


@pytest.mark.parametrize(("repeats", "order"), [(1, "fb"), (3, "fbfbfb")])
def test_passes_alternate_over_prompts_too(model: PreTrainedModel, repeats: int, order: str) -> None:
    log: list[str] = []
    config = BenchConfig(repeats=repeats, warmup_tokens=0)
    list(measure(model, byte_tokenizer(), QUESTIONS, [Scripted("hf", log), Scripted("b", log)], config))
    directions = {"f": ["hf", "b"], "b": ["b", "hf"]}
    assert log == [name for direction in order for name in directions[direction]]


def test_no_warm_up_where_not_asked_for(model: PreTrainedModel) -> None:
    log: list[str] = []
    config = BenchConfig(warmup_tokens=0)
    list(measure(model, byte_tokenizer(), QUESTIONS, [Scripted("hf", log)], config))
    assert log == ["hf"] * 4


def test_times_and_differences_are_kept(model: PreTrainedModel) -> None:
    log: list[str] = []
    systems = [Scripted("hf", log), Scripted("b", log, [(1, 2, 3), (1, 9, 3), (1, 9, 3)])]
    config = BenchConfig(warmup_tokens=0)
    hf, other = list(measure(model, byte_tokenizer(), QUESTIONS[:1], systems, config))
    assert hf.runs == (RunTimes(3, 1.0, 2, 0.5),) * 2
    assert (hf.tokens_per_second, hf.decode_tokens_per_second) == (3.0, 4.0)
    assert hf.repeatable and hf.divergence is None
    assert not other.repeatable and other.divergence is None
    again = list(measure(model, byte_tokenizer(), QUESTIONS[:1], systems, config))[1]
    assert again.divergence is not None and again.divergence.index == 1
    ids = torch.tensor([byte_tokenizer()("user: abcabcabc\nassistant: ")["input_ids"] + [1]])
    top = model(ids).logits[0, -1].sort(descending=True).values
    assert again.divergence.top_2_gap == pytest.approx(float(top[0] - top[1]), abs=1e-5)


def test_real_systems_agree_and_their_figures_add_up(model: PreTrainedModel) -> None:
    config = BenchConfig(max_new_tokens=24, warmup_tokens=2, max_turns=2)
    found = list(measure(model, byte_tokenizer(), QUESTIONS, systems_of(model), config))
    assert [m.turn for m in found if m.system == "hf"] == [0, 1, 0]
    for m in found:
        assert m.divergence is None and m.repeatable
        assert m.num_tokens == 24
        for run in m.runs:
            assert 0.0 < run.decode_seconds < run.seconds
            assert 0 < run.decode_tokens < run.tokens == 24
        assert (m.stats is None) == m.system.startswith("hf")
        if m.stats is not None:
            assert m.stats.emitted == 2 * 24
    one_by_one = [m for m in found if m.system in ("hf", "none")]
    assert {run.decode_tokens for m in one_by_one for run in m.runs} == {23}


def test_later_turns_follow_the_references_answer(model: PreTrainedModel) -> None:
    tokenizer = byte_tokenizer()
    answer = tuple(tokenizer("four")["input_ids"])
    systems = [Scripted("hf", [], [answer]), Scripted("b", [], [(7, 7)])]
    config = BenchConfig(max_turns=2, warmup_tokens=0)
    found = list(measure(model, tokenizer, QUESTIONS[:1], systems, config))
    history = "user: abcabcabc\nassistant: four\nuser: and more\nassistant: "
    assert [m.num_prompt_tokens for m in found[2:]] == [len(tokenizer(history)["input_ids"])] * 2


def test_sampled_text_is_the_same_for_every_system(model: PreTrainedModel) -> None:
    config = BenchConfig(max_new_tokens=16, temperature=0.9, seed=5, warmup_tokens=0)
    systems = systems_of(model)[:3]
    found = list(measure(model, byte_tokenizer(), QUESTIONS[:1], systems, config))
    assert all(m.divergence is None and m.repeatable for m in found)
    greedy = systems[0].decode(torch.tensor([[97, 98]]), 0, {"max_new_tokens": 16, "do_sample": False})
    sampled = [
        systems[0].decode(torch.tensor([[97, 98]]), seed, {"max_new_tokens": 16, "do_sample": True}).tokens
        for seed in (5, 5, 6)
    ]
    assert sampled[0] == sampled[1] != sampled[2] != greedy.tokens


def test_systems_must_begin_with_the_reference(model: PreTrainedModel) -> None:
    for names in ([], ["b", "hf"], ["hf", "b", "b"]):
        with pytest.raises(ConfigError, match="accepted: 'hf' first"):
            list(measure(model, byte_tokenizer(), QUESTIONS, [Scripted(name, []) for name in names]))


def test_a_question_without_room_is_refused_before_anything_runs(model: PreTrainedModel) -> None:
    log: list[str] = []
    questions = [*QUESTIONS, Question(3, "long", ("a" * 400,))]
    with pytest.raises(ConfigError, match=r"question 3: 4\d\d prompt tokens and max_new_tokens=128; accepted: 512"):
        list(measure(model, byte_tokenizer(), questions, [Scripted("hf", log)]))
    assert log == []


def test_a_later_turn_without_room_is_left_out(model: PreTrainedModel) -> None:
    question = Question(1, "long", ("a", "b" * 500, "c"))
    config = BenchConfig(max_turns=3, warmup_tokens=0)
    found = list(measure(model, byte_tokenizer(), [question], [Scripted("hf", [])], config))
    assert [m.turn for m in found] == [0]


@pytest.mark.parametrize(
    "bad", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"seed": -1}, {"repeats": 0}, {"max_turns": 0}]
)
def test_bad_settings_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        BenchConfig(**bad)


def test_a_single_emission_has_no_decoding_speed() -> None:
    once = RunTimes(tokens=3, seconds=1.0, decode_tokens=0, decode_seconds=0.0)
    measurement = Measurement(1, "one", 0, "b", 5, 3, (once,), True, None, None)
    assert measurement.decode_tokens_per_second is None
    assert measurement.tokens_per_second == 3.0


def test_the_prompt_put_to_a_streamer_is_not_counted() -> None:
    watch = StreamWatch()
    watch.put(torch.zeros(1, 7))
    for block in (torch.tensor([1]), torch.tensor([[1, 2, 3]])):
        watch.put(block)
    watch.end()
    assert [count for _, count in watch.arrivals] == [1, 3]


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == first_difference([1, 2, 3], [1, 2]) == 2


def test_top_2_gap_of_an_empty_text_is_that_behind_the_prompt(model: PreTrainedModel) -> None:
    prompt = torch.tensor([[5, 6, 7]])
    top = model(prompt).logits[0, -1].sort(descending=True).values
    assert top_2_gap(model, prompt, []) == pytest.approx(float(top[0] - top[1]), abs=1e-5)
