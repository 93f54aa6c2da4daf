"""The contracts on the real default model, in fp32 on the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import EosTokenCriteria

from specdec import DeferredWriter, HFTarget, PagedKVCache, Sampler, SpeculativeDecoder, Verdict, Window
from specdec.draft.scripted import ScriptedDrafter, SyntheticDrafter
from tests.systems import GREEDY, SAMPLED, VERIFIERS, WRITERS, Recorder, continuation, plain, speculative

pytestmark = pytest.mark.slow

QUESTIONS = (
    "Repeat after me, three times: the lighthouse keeper counts the ships at night.",
    "What is the capital of France?",
    "Write a haiku about rain.",
)
MODES = {"greedy": GREEDY, "sampled": SAMPLED}
LENGTH = 24


@pytest.fixture(scope="module")
def model(smollm2):
    return smollm2[0]


@pytest.fixture(scope="module")
def batches(smollm2):
    """One prompt, and three of unequal lengths, padded on the left."""
    tokenizer = smollm2[1]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]

    def encode(some):
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        padding = {"padding": True, "tokenizer_kwargs": {"padding_side": "left"}}
        return dict(tokenizer.apply_chat_template(some, **options, **padding))

    return {1: encode(chats[:1]), 3: encode(chats)}


@pytest.fixture(scope="module")
def expected(model, batches):
    """What plain decoding gives, computed once."""
    return {
        (num_rows, mode): plain(model, inputs, seed=3, max_new_tokens=LENGTH, pad_token_id=2, **options)
        for num_rows, inputs in batches.items()
        for mode, options in MODES.items()
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
def test_drafters_give_the_text_of_plain_decoding(model, batches, expected, drafter, num_rows, mode):
    inputs = batches[num_rows]
    output = speculative(model, inputs, drafter, 3, max_new_tokens=LENGTH, pad_token_id=2, **MODES[mode])
    assert output.tolist() == expected[num_rows, mode].tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_writers_and_verifiers_give_the_text_of_plain_decoding(
    model, batches, expected, writer, verifier, num_rows, mode
):
    inputs, text = batches[num_rows], expected[num_rows, mode]
    truth = text[:, inputs["input_ids"].shape[1] :].tolist()
    drafter = SyntheticDrafter(truth, model.config.vocab_size, acceptance=0.8, depth=6, siblings=2)
    recorder = Recorder(writer)
    records = []
    output = speculative(
        model,
        inputs,
        drafter,
        3,
        writer=recorder,
        verifier=verifier,
        on_step=records.append,
        max_new_tokens=LENGTH,
        pad_token_id=2,
        **MODES[mode],
    )
    assert output.tolist() == text.tolist()
    assert sum(record.num_accepted for record in records) > 5
    [cache] = recorder.caches
    assert cache.allocator.num_free == cache.allocator.num_pages


@pytest.mark.parametrize("writer", WRITERS)
def test_pages_hold_what_plain_decoding_stores_and_nothing_else_is_read(model, batches, writer):
    inputs = batches[3]
    truth = continuation(model, inputs, max_new_tokens=LENGTH, pad_token_id=2)
    drafter = ScriptedDrafter(truth, model.config.vocab_size, depth=5, wrong_depths=(4,), siblings=1)

    def poison(cache):
        for plane in cache.planes:
            plane.pages.fill_(float("nan"))

    target = HFTarget(model)
    decoder = SpeculativeDecoder(target, drafter, Recorder(writer, prepare=poison))
    sampler = Sampler(inputs["input_ids"], criteria=[EosTokenCriteria(torch.tensor([model.config.eos_token_id]))])
    width = inputs["input_ids"].shape[1]
    with decoder.start(**inputs, sampler=sampler, max_length=width + LENGTH) as run:
        for _ in range(3):
            decoder.step(run)
        assert all(len(emitted) >= 3 for emitted in sampler.emitted) and sum(map(len, sampler.emitted)) > 12
        assert all(emitted == truth[row][: len(emitted)] for row, emitted in enumerate(sampler.emitted))
        for row in range(3):
            cache = PagedKVCache(target.layers, 64)
            plain_writer = DeferredWriter(cache)
            cache.add_row()
            window = Window.chain([run.tokens[row][: run.cache.length(row)]], (0,), (0,), "cpu")
            plain_writer.begin(window)
            target.forward(window, plain_writer, need_logits=False)
            plain_writer.commit(Verdict.keep_all(window, torch.zeros(1, dtype=torch.long)))
            for layer in (0, 14, 29):
                for stored, wanted in zip(run.cache.read(layer, row), cache.read(layer, 0), strict=True):
                    torch.testing.assert_close(stored, wanted, rtol=1e-3, atol=1e-3)
