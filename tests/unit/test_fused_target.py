"""The fused decoder against the models' own layers."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_cases import DEVICE, relative_error
from tests.models import tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3

pytest.importorskip("triton")

from specdec.decoder import SpeculativeDecoder
from specdec.errors import ConfigError, UnsupportedError
from specdec.hf.fused import fused_target
from specdec.hf.target import HFTarget
from specdec.kv.deferred import DeferredWriter
from specdec.kv.pages import PagedKVCache
from specdec.sampling import Sampler
from specdec.types import Draft, Verdict, Window

SMALL = dict(num_hidden_layers=2, head_dim=32)


def run(target, drafts, taps=(0, 1, -1)):
    """Logits and features of a tree behind a committed prompt."""
    cache = PagedKVCache(target.layers, 8, page_size=4)
    writer = DeferredWriter(cache)
    cache.add_row()
    prompt = Window.chain([[5, 9, 11, 3, 7, 20]], (0,), (0,), target.device)
    writer.begin(prompt)
    target.forward(prompt, writer, need_logits=False)
    writer.commit(Verdict.keep_all(prompt, torch.zeros(1, dtype=torch.long, device=DEVICE)))
    window = Window.over(torch.tensor([31], device=DEVICE), drafts, (0,), (6,))
    writer.begin(window)
    output = target.forward(window, writer, taps)
    return output.logits, output.features


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_mistral])
def test_logits_and_features_equal_the_models_own(make):
    model = make(**SMALL).to(DEVICE)
    drafts = Draft.trees([[(1, 0), (2, 0), (3, 1), (4, 3)]], DEVICE)
    logits, features = run(fused_target(model), drafts)
    own_logits, own_features = run(HFTarget(model), drafts)
    assert relative_error(logits, own_logits) < 1e-5
    for found, expected in zip(features, own_features, strict=True):
        assert relative_error(found, expected) < 1e-5


def test_many_rows_take_the_matrix_library_and_text_is_the_same():
    model = tiny_llama(**SMALL).to(DEVICE)
    target = fused_target(model)
    texts = []
    ids = torch.arange(131, device=DEVICE)[None] % 97
    for candidate in (target, HFTarget(model)):
        sampler = Sampler(ids)
        list(SpeculativeDecoder(candidate).stream(ids, sampler=sampler, max_length=132))
        texts.append(sampler.emitted)
    assert texts[0] == texts[1]


def test_other_models_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="model_type='qwen3'"):
        fused_target(tiny_qwen3())
    with pytest.raises(UnsupportedError, match="hidden_act='gelu'"):
        fused_target(tiny_llama(hidden_act="gelu"))
    with pytest.raises(UnsupportedError, match="dynamic"):
        fused_target(tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}))
    with pytest.raises(UnsupportedError, match="gate_proj"):
        fused_target(tiny_llama(mlp_bias=True))


def test_a_model_that_does_something_else_is_found_out():
    model = tiny_llama(**SMALL).to(DEVICE)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.01)
    with pytest.raises(UnsupportedError, match="logits differ"):
        fused_target(model)


def test_taps_are_checked():
    model = tiny_llama(**SMALL).to(DEVICE)
    with pytest.raises(ConfigError, match="tap=2"):
        run(fused_target(model), Draft.chains([[1]], DEVICE), taps=(2,))
