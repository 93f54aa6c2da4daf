"""Stopping inside a multi-token step: nothing is emitted behind the first stop, whoever drafted it."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, MaxTimeCriteria, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import specdec
from specdec.draft.scripted import ScriptedDrafter
from specdec.errors import ConfigError
from tests.models import VOCAB, tiny_llama
from tests.systems import DRAFTERS, continuation, plain, prompts, speculative


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def tokenizer():
    """One character per token: id 3 is the first of a run of printable characters."""
    vocab = {f"<{i}>": i for i in range(3)} | {chr(30 + i): i for i in range(3, VOCAB)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<0>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<0>", eos_token="<2>")


def perfect(truth, depth=6):
    return ScriptedDrafter(truth, VOCAB, depth=depth)


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("position", [0, 1, 2, 3, 5, 8, 13])
def test_an_end_token_inside_an_accepted_block_ends_the_text(model, position, depth):
    inputs = prompts(1, VOCAB)
    [free] = continuation(model, inputs, max_new_tokens=20)
    end = free[position]
    for eos in (end, [end], [end, 2], torch.tensor([end])):
        options = {"eos_token_id": eos, "max_new_tokens": 20}
        expected = plain(model, inputs, **options)
        # The drafter goes on past the end: it knows the text that would have followed.
        output = speculative(model, inputs, perfect([free], depth), **options)
        assert output.tolist() == expected.tolist()
        assert output[0, -1] == end and end not in output[0, 9:-1]


def test_without_any_end_token_the_length_ends_the_text(model):
    inputs = prompts(2, VOCAB)
    expected = plain(model, inputs, eos_token_id=None, max_new_tokens=15)
    output = speculative(model, inputs, "suffix", eos_token_id=None, max_new_tokens=15)
    assert output.tolist() == expected.tolist()


def test_an_end_token_copied_from_the_prompt_ends_the_text(model):
    inputs = prompts(1, VOCAB)
    [free] = continuation(model, inputs, max_new_tokens=12)
    repeated = torch.cat([inputs["input_ids"], torch.tensor([free])] * 2 + [inputs["input_ids"]], dim=1)
    again = {"input_ids": repeated, "attention_mask": torch.ones_like(repeated)}
    [text] = continuation(model, again, max_new_tokens=12)
    for end in text[:5]:
        for drafter in ("ngram", "suffix"):
            expected = plain(model, again, max_new_tokens=12, eos_token_id=end)
            assert speculative(model, again, drafter, max_new_tokens=12, eos_token_id=end).tolist() == expected.tolist()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_drafter_drafts_or_emits_beyond_the_budget(model, drafter):
    inputs = prompts(2, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=30)
    for budget in range(1, 9):
        records = []
        output = speculative(
            model, inputs, DRAFTERS[drafter](truth, VOCAB), max_new_tokens=budget, on_step=records.append
        )
        assert output[:, 9:].tolist() == [row[:budget] for row in truth]
        emitted = [0, 0]
        for record in records:
            for row, parents, tokens in zip(record.rows, record.draft_parents, record.emitted, strict=True):
                depths = [0]
                for parent in parents:
                    depths.append(depths[parent] + 1)
                assert emitted[row] + max(depths) + 1 <= budget
                emitted[row] += len(tokens)
        assert emitted == [budget, budget]


def test_drafts_stop_where_the_budget_ends(model):
    inputs = prompts(1, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=30)
    records = []
    speculative(model, inputs, perfect(truth, 8), max_new_tokens=12, on_step=records.append)
    emitted = 0
    for record in records:
        assert record.num_drafted <= 12 - emitted - 1
        emitted += len(record.emitted[0])


@pytest.mark.parametrize("value", [0, -1])
def test_an_impossible_budget_is_an_error(model, value):
    with pytest.raises(ValueError, match=r"max_new_tokens|max_length"):
        speculative(model, prompts(1, VOCAB), "none", max_new_tokens=value)


def test_max_length_counts_the_prompt(model):
    inputs = prompts(1, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=30)
    output = speculative(model, inputs, perfect(truth), max_length=20)
    assert output.tolist() == plain(model, inputs, max_length=20).tolist()
    with pytest.raises(ValueError):
        speculative(model, inputs, perfect(truth), max_length=9)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_stop_string_ends_the_text_wherever_it_lies(model, tokenizer, width):
    inputs = prompts(1, VOCAB)
    [free] = continuation(model, inputs, max_new_tokens=16)
    for start in range(0, 13):
        stop = tokenizer.decode(free[start : start + width])
        options = {"stop_strings": [stop], "tokenizer": tokenizer, "max_new_tokens": 16}
        expected = plain(model, inputs, **options)
        output = speculative(model, inputs, perfect([free]), **options)
        assert output.tolist() == expected.tolist()
        own = GenerationConfig(stop_strings=[stop], max_new_tokens=16, pad_token_id=0)
        output = specdec.generate(model, **inputs, generation_config=own, tokenizer=tokenizer, drafter=perfect([free]))
        assert output.tolist() == expected.tolist() and own.stop_strings == [stop]


def test_stop_strings_of_the_models_own_configuration_count(model, tokenizer):
    inputs = prompts(1, VOCAB)
    [free] = continuation(model, inputs, max_new_tokens=16)
    stop = tokenizer.decode(free[4:6])
    model.generation_config.stop_strings = [stop]
    try:
        expected = plain(model, inputs, tokenizer=tokenizer, max_new_tokens=16)
        output = speculative(model, inputs, perfect([free]), tokenizer=tokenizer, max_new_tokens=16)
        assert output.tolist() == expected.tolist() and output.shape[1] < 9 + 16
        assert model.generation_config.stop_strings == [stop]
        with pytest.raises(ConfigError, match="tokenizer"):
            speculative(model, inputs, "none", max_new_tokens=4)
    finally:
        model.generation_config.stop_strings = None


def test_batches_stop_row_by_row_and_together_as_plain_decoding_does(model, tokenizer):
    inputs = prompts(3, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=16)
    stops = [tokenizer.decode(row[i : i + 2]) for i, row in zip((2, 5, 9), truth, strict=True)]
    for eos in (None, truth[1][7]):
        options = {"stop_strings": stops, "tokenizer": tokenizer, "max_new_tokens": 16, "eos_token_id": eos}
        expected = plain(model, inputs, **options)
        assert speculative(model, inputs, perfect(truth), **options).tolist() == expected.tolist()


class OnToken(StoppingCriteria):
    """A user's criterion; counts how it is called."""

    def __init__(self, tokens):
        self.tokens, self.seen = tokens, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return torch.tensor([int(row[-1]) in self.tokens for row in input_ids])


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_users_criterion_sees_every_token_as_in_plain_decoding(model, num_rows):
    inputs = prompts(num_rows, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=16)
    seen = []
    for run in (plain, lambda *args, **options: speculative(*args, perfect(truth), **options)):
        criterion = OnToken({row[6] for row in truth})
        options = {"stopping_criteria": StoppingCriteriaList([criterion]), "max_new_tokens": 16}
        seen.append((run(model, inputs, **options).tolist(), criterion.seen))
    assert seen[0] == seen[1]


def test_time_runs_out(model):
    criteria = StoppingCriteriaList([MaxTimeCriteria(max_time=0.0)])
    output = speculative(model, prompts(1, VOCAB), "suffix", stopping_criteria=criteria, max_new_tokens=30)
    assert output.shape[1] == 10


class Collector(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.given, self.ended = [], False

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("num_rows", [1, 3])
def test_streamers_get_what_plain_decoding_gives_them(model, num_rows):
    inputs = prompts(num_rows, VOCAB)
    free = continuation(model, inputs, max_new_tokens=16)
    end = free[0][6]
    given = []
    for run in (plain, lambda *args, **options: speculative(*args, perfect(free), **options)):
        streamer = Collector()
        output = run(model, inputs, streamer=streamer, eos_token_id=end, max_new_tokens=16)
        assert streamer.ended
        given.append((streamer.given, output.tolist()))
    assert given[0] == given[1]


def test_text_streamers_write_the_text(model, tokenizer, capsys):
    from transformers import TextStreamer

    inputs = prompts(1, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=12)
    speculative(model, inputs, perfect(truth), streamer=TextStreamer(tokenizer, skip_prompt=True), max_new_tokens=12)
    assert capsys.readouterr().out.strip("\n") == tokenizer.decode(truth[0])


def test_scores_ids_and_stream_are_cut_at_the_same_token(model, tokenizer):
    inputs = prompts(1, VOCAB)
    [free] = continuation(model, inputs, max_new_tokens=16)
    streamer = Collector()
    output = speculative(
        model,
        inputs,
        perfect([free], 9),
        stop_strings=[tokenizer.decode(free[5:7])],
        tokenizer=tokenizer,
        streamer=streamer,
        max_new_tokens=16,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert output.sequences.shape[1] == 9 + 7
    assert len(output.scores) == len(output.logits) == 7
    assert [token for [token] in streamer.given[1:]] == free[:7]
