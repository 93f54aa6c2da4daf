"""τ along a text equals τ of the decoder itself, for chains and trees."""

from __future__ import annotations

import pytest
import torch

import specdec
from specdec.bench.acceptance import Setting, measure, replies, texts_of
from specdec.bench.eval import drafter_of
from specdec.hf.initial_head import HeadShape, initial_head
from specdec.hf.teacher import TeacherModel
from specdec.train.selftalk import pick_tokens_torch
from specdec.types import StepRecord
from tests.models import tiny_llama

SETTINGS = (Setting("chain 1", 1), Setting("chain 4", 4), Setting("tree 8", 3, 8, 3), Setting("tree 16", 4, 16, 4))


@pytest.mark.parametrize(("norm_output", "window"), [(True, None), (False, None), (True, 9)])
def test_tau_along_the_text_is_the_decoders(norm_output: bool, window: int | None):
    model = tiny_llama(num_hidden_layers=4, initializer_range=0.15, tie_word_embeddings=True)
    head = initial_head(model, HeadShape(norm_output=norm_output, sliding_window=window))
    with torch.no_grad():  # a head that ignores nothing and agrees now and then
        for parameter in head.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [20, 21, 22]]
    teacher = TeacherModel(model, head.config.taps, 64)
    texts = [
        text
        for rows in replies(model, prompts, [0], pick_tokens_torch, max_new_tokens=40)
        for text in texts_of(rows, teacher, rows_at_once=2)
    ]
    found = measure(head, texts, SETTINGS)
    for setting in SETTINGS:
        records: list[StepRecord] = []
        for prompt in prompts:
            specdec.generate(
                model,
                torch.tensor([prompt]),
                drafter=drafter_of(head, model, setting),
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=0,
                on_step=records.append,
            )
        emitted = sum(len(record.emitted[0]) for record in records)
        assert (found[setting.name].steps, found[setting.name].tau) == (
            len(records),
            pytest.approx(emitted / len(records)),
        )
    assert found["tree 16"].tau > found["chain 1"].tau >= 1
    assert found["chain 4"].tau > 1.02
