"""Losslessness over randomly drawn requests: drafts of any shape and quality, batches, sampling, page sizes."""

from __future__ import annotations

import functools
import random
from typing import final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from specdec import SpecConfig
from specdec.draft.base import Drafter
from specdec.types import Draft
from tests.models import tiny_gemma2, tiny_gpt2, tiny_llama, tiny_mistral
from tests.systems import VERIFIERS, WRITERS, plain, speculative

SMALL = 23
MAKERS = {"llama": tiny_llama, "mistral": tiny_mistral, "gemma2": tiny_gemma2, "gpt2": tiny_gpt2}


@functools.cache
def small(name: str):
    return MAKERS[name](vocab_size=SMALL)


@final
class RandomTrees(Drafter):
    """Random trees in which the true next tokens stand with some probability, at any place."""

    taps = ()

    def __init__(self, truth, seed: int, largest: int, quality: float) -> None:
        self.truth, self.seed, self.largest, self.quality = truth, seed, largest, quality

    def begin(self, prompts, max_length):
        self.dice = random.Random(self.seed)

    def fork(self, source, copies):
        pass

    def propose(self, context):
        return Draft.trees([self.tree(context, i) for i in range(len(context.rows))])

    def tree(self, context, i):
        size = self.dice.randint(0, min(self.largest, context.max_nodes[i]))
        truth = self.truth[context.rows[i]][context.num_generated[i] :]
        nodes: list[tuple[int, int]] = []
        depth, on_path, taken = [0], [True], set()
        for _ in range(size):
            parent = self.dice.randrange(len(depth))
            if depth[parent] >= min(context.max_depths[i], len(truth)):
                continue
            right = truth[depth[parent]]
            token = right if self.dice.random() < self.quality else self.dice.randrange(SMALL)
            if (parent, token) not in taken:
                taken.add((parent, token))
                nodes.append((token, parent))
                depth.append(depth[parent] + 1)
                on_path.append(on_path[parent] and token == right)
        return nodes

    def observe(self, window, features, verdict):
        pass

    def end(self):
        pass


@st.composite
def requests(draw):
    sampled = draw(st.booleans())
    options = {"do_sample": sampled, "max_new_tokens": draw(st.integers(1, 24))}
    if sampled:
        options |= {
            "temperature": draw(st.sampled_from([0.3, 0.7, 1.0, 1.5])),
            "top_k": draw(st.sampled_from([0, 1, 5, 50])),
            "top_p": draw(st.sampled_from([0.5, 0.9, 1.0])),
        }
        options |= draw(st.sampled_from([{}, {"min_p": 0.1}, {"typical_p": 0.8}, {"epsilon_cutoff": 0.02}]))
    options |= draw(
        st.sampled_from(
            [
                {},
                {"repetition_penalty": 1.4},
                {"no_repeat_ngram_size": 2},
                {"bad_words_ids": [[3], [4, 5]]},
                {"min_new_tokens": 4},
                {"suppress_tokens": [7, 8]},
                {"sequence_bias": [[[9], -3.0], [[10, 11], 2.0]]},
                {"exponential_decay_length_penalty": (3, 1.2)},
                {"forced_eos_token_id": 6},
            ]
        )
    )
    options["eos_token_id"] = draw(st.sampled_from([None, 2, [2, 12], [2, 5, 17]]))
    if options["eos_token_id"] is None:
        options.pop("exponential_decay_length_penalty", None)  # transformers cannot apply it without an end token
    return options


@given(
    family=st.sampled_from(sorted(MAKERS)),
    options=requests(),
    num_rows=st.integers(1, 4),
    length=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    largest=st.integers(0, 20),
    quality=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    writer=st.sampled_from(sorted(WRITERS)),
    verifier=st.sampled_from(sorted(VERIFIERS)),
    page_size=st.sampled_from([1, 4, 16, 64]),
    same_prompts=st.booleans(),
)
@settings(max_examples=300, deadline=None)
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
def test_any_request_gives_the_text_of_plain_decoding(
    family, options, num_rows, length, seed, largest, quality, writer, verifier, page_size, same_prompts
):
    model = small(family)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, SMALL, (num_rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, num_rows):
        if same_prompts:
            ids[row] = ids[0]
        else:
            padding = int(torch.randint(0, length, (), generator=generator))
            ids[row, :padding], mask[row, :padding] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected = plain(model, inputs, seed, **options)
    rng_after = torch.get_rng_state()
    truth = expected[:, length:].tolist()
    output = speculative(
        model,
        inputs,
        RandomTrees(truth, seed, largest, quality),
        seed,
        writer=writer,
        verifier=verifier,
        spec_config=SpecConfig(page_size=page_size),
        **options,
    )
    assert output.tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), rng_after)


def random_config(seed: int) -> GenerationConfig:
    """One configuration of the supported set."""
    dice = random.Random(seed)
    values: dict = {"max_new_tokens": dice.randint(1, 30), "do_sample": dice.random() < 0.6, "pad_token_id": 0}
    values["eos_token_id"] = dice.choice([None, 5, [5, 9]])
    if values["do_sample"]:
        values |= {"temperature": dice.uniform(0.2, 1.8), "top_k": dice.choice([0, 3, 10, 50])}
        values |= dice.choice([{}, {"top_p": dice.uniform(0.3, 1.0)}, {"min_p": 0.05}, {"typical_p": 0.7}])
        values |= dice.choice([{}, {"num_return_sequences": 3}])
    values |= dice.choice([{}, {"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 3}, {"min_new_tokens": 6}])
    values |= dice.choice([{}, {"renormalize_logits": True}, {"remove_invalid_values": True}])
    values |= {
        "return_dict_in_generate": True,
        "output_scores": dice.random() < 0.7,
        "output_logits": dice.random() < 0.7,
    }
    return GenerationConfig(**values)


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("seed", range(50))
def test_a_random_generation_config_gives_equal_sequences_and_scores(seed):
    model = small(sorted(MAKERS)[seed % len(MAKERS)])
    config = random_config(seed)
    generator = torch.Generator().manual_seed(seed)
    inputs = {"input_ids": torch.randint(3, SMALL, (1 + seed % 3, 8), generator=generator)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    torch.manual_seed(seed)
    expected = model.generate(**inputs, generation_config=config)
    truth = expected.sequences[:, 8:].tolist()
    drafter = RandomTrees(truth, seed, largest=12, quality=0.7)
    torch.manual_seed(seed)
    import specdec

    before = config.to_dict()
    output = specdec.generate(model, **inputs, generation_config=config, drafter=drafter)
    assert config.to_dict() == before
    assert output.sequences.tolist() == expected.sequences.tolist()
    eos = config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or [])
    for name in ("scores", "logits"):
        ours, theirs = getattr(output, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        for index, (one, other) in enumerate(zip(ours or (), theirs or (), strict=True)):
            # Behind a row's end plain decoding scores padding; there is nothing to compare.
            live = [row for row, tokens in enumerate(truth) if not ends.intersection(tokens[:index])]
            torch.testing.assert_close(one[live], other[live], rtol=1e-4, atol=1e-4)
