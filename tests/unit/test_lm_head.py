"""The draft's `lm_head`: narrowed, rounded to int8, and the best of its logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specdec.draft.lm_head import Int8LmHead, best_of, narrowed, plain_lm_head
from specdec.errors import ConfigError, UnsupportedError
from tests.unit.test_eagle_head import TINY, random_head


@pytest.mark.parametrize("shape", [(1, 1, 4096), (2, 3, 8192), (1, 8, 8192), (1, 2, 50), (1, 1, 8191)], ids=str)
@pytest.mark.parametrize("count", [1, 4, 8])
def test_best_of_is_topk(shape: tuple[int, int, int], count: int) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(count))
    values, indices = best_of(logits, count)
    expected = logits.topk(count, dim=2)
    assert values.equal(expected.values) and indices.equal(expected.indices)


@pytest.mark.skipif("onednn" not in torch.backends.quantized.supported_engines, reason="no int8 product in this torch")
@pytest.mark.parametrize("tokens", [40, 192, 1000])
@pytest.mark.parametrize("nodes", [1, 2, 5, 17])
def test_int8_is_close_to_the_weights_it_rounds(tokens: int, nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    weight = torch.randn(tokens, 96, generator=generator) * torch.rand(tokens, 1, generator=generator)
    hidden = torch.randn(2, nodes, 96, generator=generator)
    exact, rounded = plain_lm_head(weight)(hidden), Int8LmHead(weight)(hidden)
    assert rounded.shape == exact.shape
    assert (rounded - exact).norm() / exact.norm() < 0.02


@pytest.mark.skipif("onednn" not in torch.backends.quantized.supported_engines, reason="no int8 product in this torch")
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_int8_survives_hidden_states_that_cannot_be_scaled(value: float) -> None:
    hidden = torch.full((1, 2, 96), value)
    logits = Int8LmHead(torch.randn(40, 96))(hidden)
    assert logits.shape == (1, 2, 40)
    if value == 0.0:
        assert not logits.any()


def test_int8_is_for_cpus() -> None:
    with pytest.raises(UnsupportedError, match=r"int8_lm_head=True on meta .*; accepted: CPU, onednn"):
        Int8LmHead(torch.zeros(4, 4, device="meta"))


def test_narrowing_keeps_ids_and_rows_together() -> None:
    head = random_head(dataclasses.replace(TINY, draft_vocab_size=6))
    head.set_vocabulary(torch.tensor([3, 8, 11, 20, 30, 39]))
    assert head.lm_head is not None
    ids, weight = narrowed(head, None)
    assert ids is not None and ids.tolist() == [3, 8, 11, 20, 30, 39] and weight.equal(head.lm_head.weight)
    ids, weight = narrowed(head, (39, 8, 5))
    assert ids is not None and ids.tolist() == [8, 39] and weight.equal(head.lm_head.weight[[1, 5]])
    head.set_token_order(torch.tensor([20, 1, 3, 2, 39]))
    ids, weight = narrowed(head, 3)
    assert ids is not None and ids.tolist() == [3, 20] and weight.equal(head.lm_head.weight[[0, 3]])
    with pytest.raises(ConfigError, match=r"vocabulary=\(1, 2\): the head can draft none of these tokens"):
        narrowed(head, (1, 2))


def test_a_whole_vocabulary_needs_no_map() -> None:
    head = random_head(TINY)
    assert narrowed(head, None)[0] is None
    head.set_vocabulary(torch.arange(39, -1, -1))
    ids, _ = narrowed(head, None)
    assert ids is not None and ids.tolist() == list(range(39, -1, -1))
