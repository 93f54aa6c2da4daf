"""The fused decoder against the models' own layers."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_cases import DEVICE, relative_error
from tests.models import tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3

pytest.importorskip("triton")

from specdec.errors import ConfigError, UnsupportedError
from specdec.graphs import fused_target as fused_target_module
from specdec.graphs.routes import FusedRoute, LibraryRoute
from specdec.graphs.weights import joined
from specdec.hf.fused import fused_target
from specdec.hf.target import HFTarget
from specdec.kernels.skinny_linear import Blocks
from specdec.kv.deferred import DeferredWriter
from specdec.kv.pages import PagedKVCache
from specdec.types import Draft, Verdict, Window

SMALL = dict(num_hidden_layers=2, head_dim=32)
# Wide tiles: what the interpreter pays for is the number of programs.
TILINGS = {
    (name, rows): Blocks(rows, 16, 128, 1, 1)
    for name in ("qkv", "output", "gate", "down", "lm_head")
    for rows in (4, 8)
}
TREE = Draft.trees([[(1, 0), (2, 0), (3, 1), (4, 3)]], DEVICE)


def run(target, drafts, taps=(0, 1, -1)):
    """Logits and features of a tree behind a committed prompt."""
    cache = PagedKVCache(target.layers, 8, page_size=4)
    writer = DeferredWriter(cache)
    cache.add_row()
    prompt = Window.chain([[5, 9, 11]], (0,), (0,), target.device)
    writer.begin(prompt)
    target.forward(prompt, writer, need_logits=False)
    writer.commit(Verdict.keep_all(prompt, torch.zeros(1, dtype=torch.long, device=DEVICE)))
    window = Window.over(torch.tensor([31], device=DEVICE), drafts, (0,), (3,))
    writer.begin(window)
    output = target.forward(window, writer, taps)
    return output.logits, output.features


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_mistral])
def test_logits_and_features_equal_the_models_own(make):
    model = make(**SMALL).to(DEVICE)
    logits, features = run(fused_target(model, tilings=TILINGS), TREE)
    own_logits, own_features = run(HFTarget(model), TREE)
    assert relative_error(logits, own_logits) < 1e-5
    for found, expected in zip(features, own_features, strict=True):
        assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize(("make", "merge"), [(tiny_llama, False), (tiny_llama, True), (tiny_qwen2, True)])
def test_the_library_route_gives_the_same_logits(make, merge, monkeypatch):
    monkeypatch.setattr(fused_target_module, "MOST_FUSED_ROWS", {True: 0, False: 0})
    model = make(**SMALL).to(DEVICE)
    own_logits, own_features = run(HFTarget(model), TREE)
    before = [parameter.clone() for parameter in model.parameters()]
    target = fused_target(model, merge=merge)
    assert isinstance(target.route(3), LibraryRoute)
    assert (joined(target.weights.layers[0].qkv) is not None) == merge
    logits, features = run(target, TREE)
    assert relative_error(logits, own_logits) < 1e-5
    for found, expected in zip(features, own_features, strict=True):
        assert relative_error(found, expected) < 1e-5
    # The model's own forward is what it was, wherever its weights lie now.
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(run(HFTarget(model), TREE)[0], own_logits)


def test_routes_by_rows_and_size():
    target = fused_target(tiny_llama(**SMALL).to(DEVICE), tilings=TILINGS)
    assert [type(target.route(rows)) for rows in (1, 64, 65)] == [FusedRoute, FusedRoute, LibraryRoute]


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
        fused_target(model, tilings=TILINGS)


def test_taps_are_checked():
    model = tiny_llama(**SMALL).to(DEVICE)
    with pytest.raises(ConfigError, match="tap=2"):
        run(fused_target(model, tilings=TILINGS), Draft.chains([[1]], DEVICE), taps=(2,))
