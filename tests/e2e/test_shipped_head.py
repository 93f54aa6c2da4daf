"""The head that ships for the default model: it is found, it drafts well, and the text stays that of plain decoding."""

from __future__ import annotations

import pytest
import torch

import specdec
from specdec.hf.eagle import load_eagle_drafter

QUESTIONS = ["Why is the sky blue?", "Name three fruits and their colours."]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_the_shipped_head_is_lossless_and_worth_having(smollm2, mode: str) -> None:
    model, tokenizer = smollm2
    options = {"do_sample": False} if mode == "greedy" else {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    emitted, steps = 0, 0
    for question in QUESTIONS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        records: list = []
        torch.manual_seed(3)
        expected = model.generate(ids, max_new_tokens=24, **options)
        torch.manual_seed(3)
        output = specdec.generate(model, ids, drafter="eagle", max_new_tokens=24, on_step=records.append, **options)
        assert output.tolist() == expected.tolist()
        emitted += sum(len(tokens) for record in records for tokens in record.emitted)
        steps += len(records)
    assert emitted / steps > (1.8 if mode == "greedy" else 1.4)


@pytest.mark.slow
def test_on_a_cpu_drafts_are_short_chains_unless_asked_otherwise(smollm2) -> None:
    model, _ = smollm2
    assert load_eagle_drafter(None, model).config.width == 1
    tree = load_eagle_drafter(None, model, width=4, depth=3, nodes=9, int8_lm_head=False).config
    assert (tree.width, tree.depth, tree.nodes, tree.int8_lm_head) == (4, 3, 9, False)
