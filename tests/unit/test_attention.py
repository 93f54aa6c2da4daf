"""The fast attention equals the readable one, on every shape of prefix, window and rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import Draft, PagedKVCache, Window
from specdec.attention.paged import attend_paged
from specdec.attention.reference import AttentionRules, attend
from specdec.kv.staging import Staging
from specdec.target import LayerShape

HEADS, KV_HEADS, DK, DV = 6, 2, 8, 4


def brute_force(query, keys, values, visible, rules):
    """Attention of one node over explicit lists of keys and values, written out in fp64."""
    out = torch.zeros(HEADS, DV, dtype=torch.float64)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = torch.stack([query[head].double() @ k[group].double() * rules.scaling for k in keys])
        if rules.softcap is not None:
            scores = rules.softcap * torch.tanh(scores / rules.softcap)
        weights = scores.exp() * torch.tensor(visible)
        total = weights.sum() + (0 if rules.sinks is None else rules.sinks[head].double().exp())
        out[head] = sum(w / total * v[group].double() for w, v in zip(weights, values, strict=True))
    return out


@given(
    lengths=st.one_of(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.just([300])),
    parents=st.lists(st.integers(0, 12), max_size=12),
    is_chain=st.booleans(),
    sliding=st.sampled_from([None, 3, 8]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    page_size=st.sampled_from([1, 4, 16]),
    interleaved=st.booleans(),
)
@settings(max_examples=80)
def test_fast_and_readable_attention_equal_brute_force(
    lengths, parents, is_chain, sliding, softcap, has_sinks, page_size, interleaved
):
    torch.manual_seed(len(parents) * 41 + sum(lengths))
    shape = LayerShape(KV_HEADS, DK, DV, torch.float32, torch.device("cpu"))
    cache = PagedKVCache([shape], 512, page_size)
    for plane in cache.planes:
        plane.pages.fill_(float("nan"))
    rows = tuple(cache.add_row() for _ in lengths)
    if interleaved:  # pages of different rows alternate, so that no row is contiguous
        for _ in range(max(lengths)):
            for row in rows:
                if cache.length(row) < lengths[row]:
                    cache.reserve([row], [1])
                    cache.advance(row, 1)
    else:
        cache.reserve(rows, lengths)
        for row in rows:
            cache.advance(row, lengths[row])
    k_pages, v_pages = cache.layer_pages(0)
    for row in rows:
        slots = cache.slots(row, 0, lengths[row])
        k_pages.flatten(0, 1)[slots] = torch.randn(len(slots), KV_HEADS, DK)
        v_pages.flatten(0, 1)[slots] = torch.randn(len(slots), KV_HEADS, DV)
    nodes = [(100 + i, i if is_chain else min(parent, i)) for i, parent in enumerate(parents)]
    draft = Draft.trees([nodes[: len(nodes) - row] if row < len(nodes) else [] for row in rows])
    window = Window.over(torch.full((len(rows),), 99), draft, rows, tuple(lengths))
    staging = Staging(cache, window)
    view = staging.put(0, *(torch.randn(*window.tokens.shape, KV_HEADS, d) for d in (DK, DV)))
    rules = AttentionRules(0.3, sliding, softcap, torch.randn(HEADS) if has_sinks else None)
    query = torch.randn(len(rows), HEADS, window.width, DK)

    slow, fast = attend(query, view, window, rules), attend_paged(query, view, window, rules)

    for row in rows:
        prefix_k, prefix_v = cache.read(0, row)
        for node in range(int(window.num_nodes[row])):
            path = [node]
            while path[-1]:
                path.append(int(window.parents[row, path[-1]]))
            position = lengths[row] + len(path) - 1
            seen = [sliding is None or position - i < sliding for i in range(lengths[row])]
            seen += [j in path and (sliding is None or path.index(j) < sliding) for j in range(window.width)]
            wanted = brute_force(query[row, :, node], [*prefix_k, *view.k[row]], [*prefix_v, *view.v[row]], seen, rules)
            for output in (slow, fast):
                torch.testing.assert_close(output[row, node].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sliding", [None, 4])
def test_prompts_are_attended_causally(sliding):
    shape = LayerShape(KV_HEADS, DK, DV, torch.float32, torch.device("cpu"))
    cache = PagedKVCache([shape], 8)
    cache.add_row(), cache.add_row()
    window = Window.chain([list(range(20)), list(range(11))], (0, 1), (0, 0), "cpu")
    view = Staging(cache, window).put(0, torch.randn(2, 20, KV_HEADS, DK), torch.randn(2, 20, KV_HEADS, DV))
    query, rules = torch.randn(2, HEADS, 20, DK), AttentionRules(0.3, sliding)
    slow, fast = attend(query, view, window, rules), attend_paged(query, view, window, rules)
    torch.testing.assert_close(slow[0], fast[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slow[1, :11], fast[1, :11], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rope_type", ["default", "dynamic", "longrope"])
def test_a_model_can_be_trained_after_it_was_driven(rope_type):
    from tests.models import VOCAB, tiny_llama
    from tests.systems import plain, prompts, speculative

    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [1.5] * 4}
    model = tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4} if rope_type == "default" else rope)
    inputs = prompts(1, VOCAB, length=30)
    output = speculative(model, inputs, "suffix", max_new_tokens=6)
    if rope_type == "default":
        assert output.tolist() == plain(model, inputs, max_new_tokens=6).tolist()
    model.requires_grad_(True)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert model.lm_head.weight.grad is not None
