"""Quantised pages on a GPU: token identity over the same pages, with every attention that reads them."""

import pytest
import torch

from specdec import SpecConfig
from tests.models import VOCAB, tiny_llama
from tests.systems import DRAFTERS, GREEDY, SAMPLED, WRITERS, prompts, speculative

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED])
@pytest.mark.parametrize("attention", ["paged", "reference", "fused"])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("writer", WRITERS)
def test_speculation_equals_plain_decoding_over_the_same_pages(writer, kind, attention, mode):
    model = tiny_llama(head_dim=16).cuda()
    inputs = {name: tensor.cuda() for name, tensor in prompts(3, VOCAB).items()}
    options = {**mode, "max_new_tokens": 24, "attention": attention, "spec_config": SpecConfig(kv_dtype=kind)}
    expected = speculative(model, inputs, "none", **options).tolist()
    truth = [row[inputs["input_ids"].shape[1] :] for row in expected]
    records = []
    drafter = DRAFTERS["late-wrong-tree"](truth, VOCAB)
    output = speculative(model, inputs, drafter, writer=writer, on_step=records.append, **options)
    assert output.tolist() == expected
    assert sum(record.num_accepted for record in records) > 5
