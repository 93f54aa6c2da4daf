"""Logits processors run once for each emitted token, in order, on exactly the prefix that plain decoding would pass."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, WatermarkingConfig

from specdec.draft.scripted import ScriptedDrafter
from tests.models import VOCAB, tiny_llama
from tests.systems import DRAFTERS, continuation, plain, prompts, speculative


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


class Recorder(LogitsProcessor):
    """A stateful processor that nobody knows: its effect depends on how often it ran."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        scores = scores.clone()
        scores[:, len(self.calls) % VOCAB] += 3.0
        return scores


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", ["right", "late-wrong-tree", "mixed-tree"])
def test_a_stateful_processor_sees_the_calls_of_plain_decoding(model, drafter, num_rows, sampled):
    inputs = prompts(num_rows, VOCAB)
    options = {"max_new_tokens": 20, "do_sample": sampled, "eos_token_id": 7}
    first = Recorder()
    expected = plain(model, inputs, logits_processor=LogitsProcessorList([first]), **options)
    second, records = Recorder(), []
    output = speculative(
        model,
        inputs,
        DRAFTERS[drafter](expected[:, 9:].tolist(), VOCAB),
        logits_processor=LogitsProcessorList([second]),
        on_step=records.append,
        **options,
    )
    assert output.tolist() == expected.tolist()
    assert second.calls == first.calls
    assert sum(record.num_accepted for record in records) > 5


PENALTIES = {
    "repetition": {"repetition_penalty": 1.5},
    "n-grams": {"no_repeat_ngram_size": 2},
    "min new tokens": {"min_new_tokens": 9, "eos_token_id": [3, 17, 40]},
    "min length": {"min_length": 16, "eos_token_id": [3, 17, 40]},
    "bad words": {"bad_words_ids": [[5], [9, 11], [40, 41, 42]]},
    "bias": {"sequence_bias": {(12,): 4.0, (13, 14): 2.5}},
    "suppressed": {"suppress_tokens": [20, 21, 22], "begin_suppress_tokens": [23]},
    "forced end": {"forced_eos_token_id": 4},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.0, seeding_scheme="selfhash", context_width=1)},
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_count_every_emitted_token(model, name, num_rows, sampled):
    inputs = prompts(num_rows, VOCAB, seed=3)
    options = {"max_new_tokens": 20, "do_sample": sampled, **PENALTIES[name]}
    expected = plain(model, inputs, **options)
    drafter = ScriptedDrafter(expected[:, 9:].tolist(), VOCAB, depth=7, siblings=1)
    records = []
    output = speculative(model, inputs, drafter, on_step=records.append, **options)
    assert output.tolist() == expected.tolist()
    assert sum(record.num_accepted for record in records) > 0


def test_a_constraint_that_tightens_inside_a_block_holds(model):
    inputs = prompts(1, VOCAB)
    [free] = continuation(model, inputs, max_new_tokens=20)
    trigger = free[4]

    def allowed(batch_id, ids):
        return [50, 51, 52] if trigger in ids[9:].tolist() else list(range(VOCAB))

    options = {"max_new_tokens": 20, "prefix_allowed_tokens_fn": allowed}
    expected = plain(model, inputs, **options)
    assert set(expected[0, 9 + 5 :].tolist()) <= {50, 51, 52}
    # The drafter proposes what the constraint forbids: the unconstrained text.
    output = speculative(model, inputs, ScriptedDrafter([free], VOCAB, depth=8), **options)
    assert output.tolist() == expected.tolist()


def test_constraints_know_their_batch_row(model):
    inputs = prompts(3, VOCAB)

    def allowed(batch_id, ids):
        return list(range(10 + 20 * batch_id, 30 + 20 * batch_id))

    options = {"max_new_tokens": 14, "prefix_allowed_tokens_fn": allowed}
    expected = plain(model, inputs, **options)
    drafter = ScriptedDrafter(expected[:, 9:].tolist(), VOCAB, depth=4)
    records = []
    assert speculative(model, inputs, drafter, on_step=records.append, **options).tolist() == expected.tolist()
    assert sum(record.num_accepted for record in records) > 0


@pytest.mark.parametrize(
    "warpers", [{"temperature": 0.1, "top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2}, {"typical_p": 0.5}, {"top_h": 0.4}]
)
def test_sampling_never_leaves_the_warped_support(model, warpers):
    inputs = prompts(2, VOCAB)
    options = {"do_sample": True, "max_new_tokens": 16, "output_scores": True, "return_dict_in_generate": True}
    expected = plain(model, inputs, **options, **warpers)
    drafter = ScriptedDrafter(expected.sequences[:, 9:].tolist(), VOCAB, depth=5)
    output = speculative(model, inputs, drafter, **options, **warpers)
    assert output.sequences.tolist() == expected.sequences.tolist()
    for index, scores in enumerate(output.scores):
        picked = scores.gather(1, output.sequences[:, 9 + index, None])
        assert bool(picked.isfinite().all())


def test_a_logits_row_is_not_changed_by_processors_that_write_in_place(model):
    class InPlace(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores.mul_(0.5)
            return scores

    inputs = prompts(1, VOCAB)
    options = {
        "max_new_tokens": 8,
        "logits_processor": LogitsProcessorList([InPlace()]),
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    truth = plain(model, inputs, max_new_tokens=8)[:, 9:].tolist()
    output = speculative(model, inputs, ScriptedDrafter(truth, VOCAB), **options)
    raw = model(output.sequences).logits[0, 8:-1]
    torch.testing.assert_close(torch.cat(output.logits), raw, rtol=1e-4, atol=1e-4)
