"""Grouped matrix products: the same figures, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

import specdec
from specdec.hf import linear
from specdec.hf.linear import fast_linears, grouped_linear
from tests.models import tiny_llama

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch computes without MKL here")


@pytest.fixture
def every_layer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layers are covered too."""
    monkeypatch.setattr(linear, "SMALLEST_WEIGHT", 1)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(attention_bias=True)


@pytest.mark.parametrize("rows", [(1,), (4,), (15,), (2, 3), (1, 8), (33,)])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (101, 64), (7, 300), (64, 1)])
@pytest.mark.parametrize("group_elements", [1, 640, 1 << 15])
def test_groups_give_what_linear_gives(rows: tuple[int, ...], outputs: int, inputs: int, group_elements: int) -> None:
    generator = torch.Generator().manual_seed(outputs + inputs)
    x = torch.randn(*rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    exact = F.linear(x.double(), weight.double(), bias.double())
    scale = exact.abs().max()
    for found in (grouped_linear(x, weight, bias, group_elements), F.linear(x, weight, bias)):
        assert found.shape == (*rows, outputs)
        assert found.is_contiguous()
        assert float((found.double() - exact).abs().max() / scale) < 2e-6
    without = grouped_linear(x, weight, None, group_elements)
    assert torch.allclose(without, F.linear(x, weight), rtol=0, atol=2e-6 * float(scale))


def test_a_transposed_input_is_taken_as_it_is() -> None:
    x, weight = torch.randn(5, 8).t(), torch.randn(6, 5)
    assert torch.allclose(grouped_linear(x, weight, None, 10), F.linear(x, weight), atol=1e-5)


@needs_mkl
@pytest.mark.usefixtures("every_layer_counts")
def test_only_small_windows_are_grouped(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def spy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(x.shape[-2])
        return F.linear(x, weight, bias)

    monkeypatch.setattr(linear, "grouped_linear", spy)
    with fast_linears(model) as names, torch.no_grad():
        for width in (1, 3, 4, 15, 16):
            model(torch.arange(width)[None])
    assert set(seen) == {4, 15}
    assert len(seen) == 2 * len(names) == 2 * (7 * 2 + 1)  # q, k, v, o, gate, up, down in two layers, and the head


@needs_mkl
@pytest.mark.usefixtures("every_layer_counts")
def test_logits_and_text_stay_the_same(model: PreTrainedModel) -> None:
    ids = torch.arange(5, 17)[None]
    plain = model(ids).logits
    text = model.generate(ids, max_new_tokens=40, do_sample=False)
    with fast_linears(model):
        assert torch.allclose(model(ids).logits, plain, atol=1e-4)
        for drafter in ("none", "suffix", "ngram"):
            assert torch.equal(specdec.generate(model, ids, drafter=drafter, max_new_tokens=40, do_sample=False), text)


@needs_mkl
@pytest.mark.usefixtures("every_layer_counts")
def test_nothing_is_left_behind(model: PreTrainedModel) -> None:
    weights = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in model.state_dict().items()}
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(ZeroDivisionError), fast_linears(model) as names:
        assert names
        assert {name: (t.data_ptr(), t.stride()) for name, t in model.state_dict().items()} == weights
        with fast_linears(model) as inner:
            assert inner == ()  # covered already
        assert "forward" in model.lm_head.__dict__
        raise ZeroDivisionError
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes


@pytest.mark.usefixtures("every_layer_counts")
def test_other_layers_are_left_alone() -> None:
    class OwnLinear(nn.Linear):
        pass

    hooked = nn.Linear(8, 8)
    hooked.forward = lambda x: x  # type: ignore[method-assign]
    left_alone = nn.ModuleList([OwnLinear(8, 8), hooked, nn.Linear(8, 8, dtype=torch.bfloat16)])
    with fast_linears(left_alone) as names:
        assert names == ()


def test_small_layers_are_not_worth_it(model: PreTrainedModel) -> None:
    with fast_linears(model) as names:
        assert names == ()
