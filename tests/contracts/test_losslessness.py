"""Invariant 1: greedy and sampled output equals `model.generate()` token for token, in fp32."""

import pytest
import torch

from tests.models import FAMILIES, VOCAB, tiny_llama
from tests.systems import DRAFTERS, GREEDY, SAMPLED, VERIFIERS, WRITERS, continuation, plain, prompts, speculative

MODES = {"greedy": GREEDY, "sampled": SAMPLED}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_combination_gives_the_text_of_plain_decoding(drafter, writer, verifier, num_rows, mode):
    model, inputs = tiny_llama(), prompts(num_rows, VOCAB)
    options = {**MODES[mode], "max_new_tokens": 24}
    expected = plain(model, inputs, seed=5, **options)
    rng_after = torch.get_rng_state()
    truth = expected[:, inputs["input_ids"].shape[1] :].tolist()
    records = []

    output = speculative(
        model,
        inputs,
        DRAFTERS[drafter](truth, VOCAB),
        seed=5,
        writer=writer,
        verifier=verifier,
        on_step=records.append,
        **options,
    )

    assert output.tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), rng_after), "the caller's RNG must end where plain decoding leaves it"
    accepted = sum(record.num_accepted for record in records)
    if drafter in ("right", "late-wrong-tree", "mixed-tree"):
        assert accepted > 0, "a test of acceptance in which nothing is accepted proves nothing"
    if drafter in ("none", "wrong"):
        assert accepted == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_text_of_plain_decoding(family, num_rows, mode):
    model, inputs = FAMILIES[family](), prompts(num_rows, VOCAB, seed=1)
    options = {**MODES[mode], "max_new_tokens": 30}
    expected = plain(model, inputs, **options)
    truth = expected[:, inputs["input_ids"].shape[1] :].tolist()
    assert len(set(truth[0])) > 5, "the text must be varied"
    records = []
    output = speculative(model, inputs, DRAFTERS["late-wrong-tree"](truth, VOCAB), on_step=records.append, **options)
    assert output.tolist() == expected.tolist()
    assert sum(record.num_accepted for record in records) > 20


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_page_size_does_not_matter(page_size):
    from specdec import SpecConfig

    model, inputs = tiny_llama(), prompts(3, VOCAB)
    options = {**SAMPLED, "max_new_tokens": 40}
    truth = continuation(model, inputs, **options)
    drafter = DRAFTERS["mixed-tree"](truth, VOCAB)
    output = speculative(model, inputs, drafter, spec_config=SpecConfig(page_size=page_size), **options)
    assert output.tolist() == plain(model, inputs, **options).tolist()


@pytest.mark.parametrize("chunk", [1, 3, 5, 100])
def test_prefill_in_chunks_does_not_matter(chunk):
    from specdec import SpecConfig

    for family in ("llama", "mistral"):
        model, inputs = FAMILIES[family](), prompts(3, VOCAB, length=23)
        truth = continuation(model, inputs, max_new_tokens=20)
        drafter = DRAFTERS["mixed-tree"](truth, VOCAB)
        output = speculative(model, inputs, drafter, spec_config=SpecConfig(prefill_chunk=chunk), max_new_tokens=20)
        assert output.tolist() == plain(model, inputs, max_new_tokens=20).tolist()


def test_one_seed_gives_one_text_and_other_seeds_give_others():
    model, inputs = tiny_llama(), prompts(1, VOCAB)
    options = {**SAMPLED, "max_new_tokens": 16}
    texts = {seed: speculative(model, inputs, "suffix", seed=seed, **options).tolist() for seed in range(5)}
    again = {seed: speculative(model, inputs, "none", seed=seed, **options).tolist() for seed in range(5)}
    assert texts == again
    assert len({str(text) for text in texts.values()}) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_padding_stays_finite_and_ends_where_it_should(dtype):
    model, inputs = tiny_llama().to(dtype), prompts(3, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=20)
    output = speculative(model, inputs, DRAFTERS["mixed-tree"](truth, VOCAB), max_new_tokens=20)
    assert output.shape == (3, inputs["input_ids"].shape[1] + 20)
    assert int(output.max()) < VOCAB
