"""The EAGLE drafter: its trees against a plain reference, its cache against fresh ones, its drafts in a real loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.draft.base import DraftContext, Drafter
from specdec.draft.eagle import EagleDraftConfig, EagleDrafter
from specdec.draft.eagle_config import EagleHeadConfig
from specdec.draft.eagle_head import EagleHead
from specdec.draft.eagle_tree import CandidatePool, reference_tree
from specdec.errors import ConfigError
from specdec.hf.eagle import eagle_drafter, load_eagle_drafter, make_pages
from specdec.hf.target import HFTarget
from specdec.kv.deferred import DeferredWriter
from specdec.kv.pages import PagedKVCache
from specdec.sampling import GeneratorNoise, Noise
from specdec.types import Draft, Verdict, Window
from tests.drafting import context_of, paths_of
from tests.models import FAMILIES, VOCAB, tiny_llama
from tests.systems import GREEDY, SAMPLED, plain, prompts, speculative
from tests.unit.test_eagle_head import random_head

SIZE = 32
EAGLE3 = EagleHeadConfig(
    kind="eagle3",
    hidden_size=SIZE,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=VOCAB,
    taps=(1, 2, 3),
    own_embeddings=True,
)
EAGLE1 = dataclasses.replace(EAGLE3, kind="eagle1", taps=(-1,), final_norm=False, fc_bias=True)
REDUCED = torch.tensor([token for token in range(VOCAB) if token % 5 != 2])


def drafter_with(head: EagleHead, **options: Any) -> EagleDrafter:
    return EagleDrafter(head, make_pages, EagleDraftConfig(**options))


def take_up(
    drafter: EagleDrafter, tokens: Sequence[int], features: tuple[Tensor, ...], row: int = 0, start: int = 0
) -> None:
    """Show the drafter a text but its last token as a prefill window, from `start` on."""
    window = Window.chain([list(tokens[start:-1])], (row,), (start,), "cpu")
    shown = tuple(tap[:, start : len(tokens) - 1] for tap in features)
    drafter.observe(window, shown, Verdict.keep_all(window, torch.tensor([tokens[-1]])))


def random_text(length: int, num_taps: int, seed: int = 0) -> tuple[list[int], tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    return tokens, tuple(torch.randn(1, length, SIZE, generator=generator) for _ in range(num_taps))


# -- trees ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_nodes", [1, 3, 11, 63])
def test_the_pool_grows_the_reference_tree(width: int, depth: int, num_nodes: int) -> None:
    tables = [
        torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(row)).mul(2).log_softmax(-1) for row in range(2)
    ]

    def behind(row: int, path: tuple[int, ...]) -> Tensor:
        last, before = (path[-1:] or (0,))[0], (path[-2:-1] or (0,))[0]
        return tables[row][before, last]

    pool = CandidatePool(2, torch.device("cpu"))
    paths: list[list[tuple[int, ...]]] = [[()], [()]]
    for _ in range(depth):
        log_probs = torch.stack([torch.stack([behind(row, path) for path in paths[row]]) for row in range(2)])
        best = log_probs.topk(width, dim=2)
        frontier = pool.grow(best.values, best.indices)
        paths = [
            [(*paths[row][parent], token) for parent, token in zip(parents, tokens, strict=True)]
            for row, (parents, tokens) in enumerate(
                zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
            )
        ]
    draft = pool.select([num_nodes, 2], [depth, 1])
    draft.validate(8)
    expected = reference_tree(lambda path: behind(0, path).tolist(), width, depth, num_nodes)
    assert set(paths_of(draft, 0)) == set(expected)
    assert set(paths_of(draft, 1)) == set(reference_tree(lambda path: behind(1, path).tolist(), width, 1, 2))


def test_a_pool_is_settled_when_growing_on_changes_nothing() -> None:
    pool = CandidatePool(1, torch.device("cpu"))
    pool.grow(torch.tensor([[[-0.1, -0.2, -9.0]]]), torch.tensor([[[4, 5, 6]]]))
    assert not pool.is_settled(3) and not pool.is_settled(4)
    assert not pool.is_settled(2), "a child of the best node may displace the second"
    assert pool.is_settled(1)
    assert pool.is_settled(4, min_score=-0.05) and not pool.is_settled(4, min_score=-0.15)


def test_candidates_that_cannot_be_are_not_drafted() -> None:
    pool = CandidatePool(2, torch.device("cpu"))
    nothing = float("nan")
    pool.grow(torch.tensor([[[-1.0, float("-inf")]], [[nothing, nothing]]]), torch.tensor([[[4, 5]], [[4, 5]]]))
    draft = pool.select([5, 5], [1, 1])
    assert draft.lengths.tolist() == [1, 0]
    assert draft.tokens[0, 0] == 4


def test_equal_scores_never_leave_a_parent_out() -> None:
    pool = CandidatePool(1, torch.device("cpu"))
    for _ in range(4):
        width = pool.frontier.tokens.shape[1]
        pool.grow(torch.tensor([0.0, -5.0]).expand(1, width, 2), torch.tensor([1, 2]).expand(1, width, 2))
    for num_nodes in range(1, 12):
        draft = pool.select([num_nodes], [4])
        draft.validate(3)
        assert draft.lengths.tolist() == [num_nodes]


# -- the drafter against the head, run afresh for every path --------------------------------------------------------


def log_probs_of(
    head: EagleHead, tokens: list[int], features: tuple[Tensor, ...], path: tuple[int, ...], window: int | None = None
) -> Tensor:
    """log p of each target token behind `tokens + path`: a causal pass for every step of the path, no cache."""
    length = len(tokens) - 1
    hidden = head.fuse(tuple(tap[:, :length] for tap in features))
    behind = tokens[1:]
    for step in range(len(path) + 1):

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            groups = q.shape[2] // k.shape[2]
            q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(groups, dim=1) for x in (k, v))
            ages = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
            seen = (ages >= 0) & (ages < (window or 10**6))
            scores = (q @ k.transpose(2, 3) * head.config.head_dim**-0.5).masked_fill(~seen, float("-inf"))
            return (scores.softmax(-1) @ v).transpose(1, 2)

        positions = torch.arange(length + step)[None]
        output = head(head.embed(torch.tensor([behind])), hidden, positions, attend)
        if step < len(path):
            hidden = torch.cat([hidden, output[:, -1:]], dim=1)
            behind = [*behind, path[step]]
    full = torch.full((head.config.vocab_size,), float("-inf"))
    full[head.target_ids] = head.logits(output)[0, -1].log_softmax(-1)
    return full


HEADS: dict[str, tuple[EagleHeadConfig, dict[str, Any]]] = {
    "eagle3": (EAGLE3, {}),
    "eagle1": (EAGLE1, {}),
    "as speculators trains": (
        dataclasses.replace(EAGLE3, norm_before_residual=True, norm_before_fc=True, norm_output=True),
        {},
    ),
    "eagle3.1": (dataclasses.replace(EAGLE3, fc_norm=True, norm_output=True, qk_norm=True), {}),
    "reduced vocabulary": (dataclasses.replace(EAGLE3, draft_vocab_size=len(REDUCED)), {}),
    "narrow": (EAGLE3, {"vocabulary": tuple(range(3, 40))}),
    "narrow and reduced": (
        dataclasses.replace(EAGLE3, draft_vocab_size=len(REDUCED)),
        {"vocabulary": tuple(range(0, VOCAB, 2))},
    ),
    "sliding": (EAGLE3, {"sliding_window": 5}),
}
LOSSY = {"int8": (EAGLE3, {"int8_lm_head": True})} if "onednn" in torch.backends.quantized.supported_engines else {}
"""Drafts that are not quite those of the head."""


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 3, 7), (5, 2, 30)], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_the_reference_trees_of_the_head(name: str, shape: tuple[int, int, int]) -> None:
    config, options = HEADS[name]
    head = random_head(config)
    if config.reduced:
        head.set_vocabulary(REDUCED)
    width, depth, nodes = shape
    drafter = drafter_with(head, width=width, depth=depth, nodes=nodes, **options)
    texts = [random_text(length, len(config.taps), seed=length) for length in (9, 4, 13)]
    drafter.begin(tuple(tokens for tokens, _ in texts), 64)
    for row, (tokens, features) in enumerate(texts):
        take_up(drafter, tokens, features, row)
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[list(options.get("vocabulary", range(VOCAB)))] = True
    for rows in ((0,), (0, 1, 2), (2, 1)):
        draft = drafter.propose(context_of([texts[row][0] for row in rows], rows=rows))
        draft.validate(VOCAB)
        for i, row in enumerate(rows):
            tokens, features = texts[row]

            def behind(path: tuple[int, ...], tokens=tokens, features=features) -> list[float]:
                full = log_probs_of(head, tokens, features, path, options.get("sliding_window"))
                return full.masked_fill(~allowed, float("-inf")).log_softmax(-1).tolist()

            assert set(paths_of(draft, i)) == set(reference_tree(behind, width, depth, nodes))


def test_limits_of_each_row_are_kept() -> None:
    head = random_head(EAGLE3)
    drafter = drafter_with(head, width=3, depth=4, nodes=20)
    texts = [random_text(7, 3, seed) for seed in range(5)]
    drafter.begin(tuple(tokens for tokens, _ in texts), 64)
    for row, (tokens, features) in enumerate(texts):
        take_up(drafter, tokens, features, row)
    tokens = [tokens for tokens, _ in texts]
    draft = drafter.propose(context_of(tokens, max_nodes=[63, 5, 0, 63, 1], max_depths=[63, 63, 63, 2, 63]))
    draft.validate(VOCAB)
    assert draft.lengths.tolist() == [20, 5, 0, 12, 1]
    assert max(map(len, paths_of(draft, 3))) == 2
    for row in range(5):
        alone = drafter.propose(context_of(tokens[row : row + 1], rows=[row], max_depths=2 if row == 3 else 63))
        assert set(paths_of(draft, row)) <= set(paths_of(alone))


def test_improbable_nodes_are_left_out() -> None:
    head = random_head(EAGLE3)
    tokens, features = random_text(8, 3)
    counts = []
    for min_probability in (0.0, 0.02, 0.3, 0.999):
        drafter = drafter_with(head, width=4, depth=4, nodes=40, min_probability=min_probability)
        drafter.begin((tokens,), 64)
        take_up(drafter, tokens, features)
        draft = drafter.propose(context_of([tokens]))
        counts.append(int(draft.lengths))
        for path in paths_of(draft):
            steps = [float(log_probs_of(head, tokens, features, path[:i])[path[i]]) for i in range(len(path))]
            assert sum(steps) >= (torch.tensor(min_probability).log() if min_probability else float("-inf")) - 1e-4
    assert counts[0] == 40 > counts[1] >= counts[2] >= counts[3]


# -- in the loop ----------------------------------------------------------------------------------------------------


def agreeing_head(model: PreTrainedModel, kind: str = "eagle3") -> EagleHead:
    """A head whose drafts a tiny Llama often accepts: it runs the target's first MLP on the last token's embedding.

    Attention finds the token itself (query and key are its embedding, sharpened), the value is the embedding, and the
    target's features disturb that a little, so that drafts depend on them.
    """
    torch.manual_seed(3)
    size, mlp = model.config.hidden_size, model.model.layers[0].mlp
    config = EagleHeadConfig(
        kind=kind,
        hidden_size=size,
        num_heads=2,
        num_kv_heads=1,
        head_dim=size,
        intermediate_size=mlp.gate_proj.out_features,
        vocab_size=model.config.vocab_size,
        taps=(0, 1, 1) if kind == "eagle3" else (-1,),
        norm_before_residual=kind == "eagle3",
        final_norm=kind == "eagle3",
        tie_lm_head=True,
    )
    head = EagleHead(config).requires_grad_(False)
    layer, eye = head.layer, torch.eye(size)
    disturbance = 0.02
    layer.mlp.load_state_dict(mlp.state_dict())
    layer.post_attention_layernorm.weight.copy_(model.model.layers[0].post_attention_layernorm.weight)
    if kind == "eagle1":
        head.fc.weight.copy_(torch.cat([eye, disturbance * torch.randn(size, size)], dim=1))
        layer.self_attn.o_proj.weight.mul_(disturbance)
        return head
    ones = torch.cat([eye, torch.zeros(size, size)], dim=1)
    layer.hidden_norm.weight.fill_(disturbance)
    layer.self_attn.q_proj.weight.copy_(torch.cat([ones, ones]) * 3)
    layer.self_attn.k_proj.weight.copy_(ones * 3)
    layer.self_attn.v_proj.weight.copy_(ones)
    layer.self_attn.o_proj.weight.copy_(torch.cat([eye, eye], dim=1) / 2)
    assert head.norm is not None
    head.norm.weight.copy_(model.model.norm.weight)
    return head


def steady_llama() -> PreTrainedModel:
    """A tiny Llama with unit embeddings that listens to its context only a little: what `agreeing_head` can follow."""
    model = tiny_llama()
    model.model.embed_tokens.weight.copy_(
        torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=1) * SIZE**0.5
    )
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.15)
    model.model.layers[1].mlp.down_proj.weight.mul_(0.1)
    return model


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("width", [1, 4])
def test_text_is_that_of_plain_decoding_and_drafts_are_accepted(
    kind: str, width: int, num_rows: int, mode: str
) -> None:
    model, inputs = steady_llama(), prompts(num_rows, VOCAB)
    options = {**(GREEDY if mode == "greedy" else SAMPLED), "max_new_tokens": 24}
    records: list = []
    drafter = eagle_drafter(agreeing_head(model, kind), model, EagleDraftConfig(width=width, depth=4, nodes=14))
    expected = plain(model, inputs, **options)
    assert speculative(model, inputs, drafter, on_step=records.append, **options).tolist() == expected.tolist()
    assert sum(record.num_accepted for record in records) >= 2 * num_rows


@pytest.mark.parametrize("name", HEADS | LOSSY)
def test_any_head_is_lossless(name: str) -> None:
    config, options = (HEADS | LOSSY)[name]
    model, inputs = tiny_llama(num_hidden_layers=4), prompts(2, VOCAB)
    head = random_head(config)
    if config.reduced:
        head.set_vocabulary(REDUCED)
    for mode in (GREEDY, SAMPLED):
        drafter = eagle_drafter(head, model, EagleDraftConfig(width=3, depth=3, nodes=9, **options))
        expected = plain(model, inputs, max_new_tokens=16, **mode)
        assert speculative(model, inputs, drafter, max_new_tokens=16, **mode).tolist() == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_any_target_may_have_a_head(family: str) -> None:
    model, inputs = FAMILIES[family](), prompts(2, VOCAB)
    shape = model.config.get_text_config()
    config = dataclasses.replace(EAGLE3, taps=(0, 1), hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
    drafter = eagle_drafter(random_head(config), model, EagleDraftConfig(width=2, depth=3, nodes=6))
    expected = plain(model, inputs, max_new_tokens=14, **GREEDY)
    assert speculative(model, inputs, drafter, max_new_tokens=14, **GREEDY).tolist() == expected.tolist()


@final
class Watched(Drafter):
    """Compares every draft of an EAGLE drafter with the draft of a fresh one that was shown the same text at once."""

    def __init__(self, inner: EagleDrafter, model: PreTrainedModel) -> None:
        self.inner = inner
        self.fresh = EagleDrafter(inner.head, make_pages, inner.config)
        self.target = HFTarget(model)
        self.compared = 0
        self.grown = 0

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        self.inner.begin(prompts, max_length)

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        self.inner.fork(source, copies)

    def observe(self, window: Window, features: tuple[Tensor, ...], verdict: Verdict) -> None:
        self.grown = max(self.grown, int((verdict.num_kept - 1).max()) if window.width > 1 else 0)
        self.inner.observe(window, features, verdict)

    def end(self) -> None:
        self.inner.end()

    def propose(self, context: DraftContext) -> Draft:
        draft = self.inner.propose(context)
        for i, row in enumerate(context.rows):
            tokens = list(context.tokens[i])
            assert self.inner.cache_length(row) == len(tokens) - 1
            self.show_fresh(tokens, row)
            alone = dataclasses.replace(
                context,
                rows=(row,),
                tokens=(tokens,),
                roots=context.roots[i : i + 1],
                max_nodes=context.max_nodes[i : i + 1],
                max_depths=context.max_depths[i : i + 1],
                num_generated=context.num_generated[i : i + 1],
            )
            assert paths_of(self.fresh.propose(alone)) == paths_of(draft, i)
            self.compared += 1
        return draft

    def show_fresh(self, tokens: list[int], row: int) -> None:
        cache = PagedKVCache(self.target.layers, 8)
        cache.add_row()
        window = Window.chain([tokens[:-1]], (0,), (0,), "cpu")
        writer = DeferredWriter(cache)
        writer.begin(window)
        features = self.target.forward(window, writer, self.taps).features
        self.fresh.begin(tuple([] for _ in range(row + 1)), 64)
        shown = dataclasses.replace(window, rows=(row,))
        self.fresh.observe(shown, features, Verdict.keep_all(shown, torch.tensor(tokens[-1:])))


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("width", [1, 3])
def test_after_any_round_drafts_are_those_of_a_fresh_prefill(kind: str, width: int, mode: str) -> None:
    model, inputs = steady_llama(), prompts(3, VOCAB)
    options = {**(GREEDY if mode == "greedy" else SAMPLED), "max_new_tokens": 20}
    inner = eagle_drafter(agreeing_head(model, kind), model, EagleDraftConfig(width=width, depth=4, nodes=9))
    watched = Watched(inner, model)
    expected = plain(model, inputs, **options)
    assert speculative(model, inputs, watched, **options).tolist() == expected.tolist()
    assert watched.compared >= 12
    assert watched.grown >= 2, "some round must have kept several drafts"


def test_a_drafter_that_draws_with_the_targets_noise_agrees_more() -> None:
    model, inputs = steady_llama(), prompts(4, VOCAB)
    accepted = {}
    for follow in (True, False):
        records: list = []
        config = EagleDraftConfig(width=1, depth=3, nodes=3, follow_noise=follow)
        drafter = eagle_drafter(agreeing_head(model), model, config)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": 30}
        expected = plain(model, inputs, **options)
        assert speculative(model, inputs, drafter, on_step=records.append, **options).tolist() == expected.tolist()
        accepted[follow] = sum(r.num_accepted for r in records) / sum(len(r.rows) for r in records)
    assert accepted[True] > accepted[False] + 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_chains_under_noise_are_the_tokens_that_the_head_would_draw(temperature: float) -> None:
    head = random_head(EAGLE3)
    texts = [random_text(8, 3, seed) for seed in range(2)]
    noise: Noise = GeneratorNoise(torch.Generator().manual_seed(1).get_state(), 3, VOCAB, torch.device("cpu"))
    drafter = drafter_with(head, width=1, depth=4, nodes=4)
    drafter.begin(tuple(tokens for tokens, _ in texts), 64)
    for row, (tokens, features) in enumerate(texts):
        take_up(drafter, tokens, features, row)
    context = context_of([tokens for tokens, _ in texts], num_generated=[5, 2], noise=noise)
    draft = drafter.propose(dataclasses.replace(context, temperature=temperature))
    for row, (tokens, features) in enumerate(texts):
        path: tuple[int, ...] = ()
        for step in range(4):
            probs = (log_probs_of(head, tokens, features, path) / temperature).softmax(-1)
            path = (*path, int((probs / noise.at([5, 2][row] + step)[row]).argmax()))
        assert paths_of(draft, row)[-1] == path


def test_one_prompt_with_several_continuations_is_taken_up_once() -> None:
    model, inputs = steady_llama(), prompts(1, VOCAB)
    options = {**SAMPLED, "max_new_tokens": 16, "num_return_sequences": 3}
    watched = Watched(eagle_drafter(agreeing_head(model), model, EagleDraftConfig(width=3, depth=3, nodes=7)), model)
    expected = plain(model, inputs, **options)
    assert speculative(model, inputs, watched, **options).tolist() == expected.tolist()
    assert watched.compared > 6


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts(length: int) -> None:
    model = steady_llama()
    inputs = {"input_ids": torch.tensor([[10, 20][:length]]), "attention_mask": torch.ones(1, length, dtype=torch.long)}
    records: list = []
    drafter = eagle_drafter(agreeing_head(model), model, EagleDraftConfig(width=2, depth=3, nodes=5))
    expected = plain(model, inputs, max_new_tokens=16, **GREEDY)
    output = speculative(model, inputs, drafter, max_new_tokens=16, on_step=records.append, **GREEDY)
    assert output.tolist() == expected.tolist()
    assert records[0].num_drafted == (0 if length == 1 else 5)
    assert records[1].num_drafted == 5


@pytest.mark.parametrize("limit", [4, 12, 20])
def test_beyond_the_heads_positions_nothing_is_drafted(limit: int) -> None:
    model, inputs = steady_llama(), prompts(1, VOCAB)
    records: list = []
    drafter = eagle_drafter(
        agreeing_head(model), model, EagleDraftConfig(width=2, depth=3, nodes=5, max_positions=limit)
    )
    expected = plain(model, inputs, max_new_tokens=24, **GREEDY)
    output = speculative(model, inputs, drafter, max_new_tokens=24, on_step=records.append, **GREEDY)
    assert output.tolist() == expected.tolist()
    length = inputs["input_ids"].shape[1]
    for record in records:
        # Pairs stand at positions 0 to limit - 1; the deepest node comes out of the last of them.
        deepest = max((len(path) for path in depths_of_record(record)), default=0)
        assert length + deepest <= limit + 2 or deepest == 0
        assert record.num_drafted == 0 or length <= limit + 1
        length += len(record.emitted[0])
    assert records[-1].num_drafted == 0
    assert any(record.num_drafted for record in records) == (limit > 9)


def depths_of_record(record: Any) -> list[tuple[int, ...]]:
    draft = Draft.trees([list(zip(record.draft_tokens[0], record.draft_parents[0], strict=True))])
    return paths_of(draft)


def test_numbers_that_are_none_draft_nothing() -> None:
    model, inputs = steady_llama(), prompts(2, VOCAB)
    head = agreeing_head(model)
    head.layer.mlp.down_proj.weight[3] = torch.nan
    records: list = []
    drafter = eagle_drafter(head, model, EagleDraftConfig(width=2, depth=3, nodes=5))
    expected = plain(model, inputs, max_new_tokens=10, **GREEDY)
    output = speculative(model, inputs, drafter, max_new_tokens=10, on_step=records.append, **GREEDY)
    assert output.tolist() == expected.tolist()
    assert sum(record.num_drafted for record in records) == 0


# -- its cache ------------------------------------------------------------------------------------------------------


def recorded_pages() -> tuple[list[PagedKVCache], Any]:
    caches: list[PagedKVCache] = []

    def make(shape: Any, num_tokens: int) -> PagedKVCache:
        caches.append(make_pages(shape, num_tokens))
        return caches[-1]

    return caches, make


def test_pages_are_back_after_the_end_and_a_drafter_can_be_used_again() -> None:
    head, (tokens, features) = random_head(EAGLE3), random_text(40, 3)
    caches, make = recorded_pages()
    drafter = EagleDrafter(head, make, EagleDraftConfig(width=2, depth=3, nodes=6))
    drafts = []
    for _ in range(2):
        drafter.begin((tokens[:20], tokens), 64)
        take_up(drafter, tokens, features, row=1)
        drafts.append(paths_of(drafter.propose(context_of([tokens], rows=[1]))))
        assert caches[-1].allocator.num_free < caches[-1].allocator.num_pages
        drafter.end()
        assert caches[-1].allocator.num_free == caches[-1].allocator.num_pages
        with pytest.raises(ConfigError, match="call begin first"):
            drafter.cache_length(0)
    assert drafts[0] == drafts[1]
    drafter.end()


def test_windows_in_chunks_give_what_one_window_gives() -> None:
    head, (tokens, features) = random_head(EAGLE3), random_text(40, 3)
    drafts = []
    for chunk in (39, 7, 1):
        drafter = drafter_with(head, width=3, depth=3, nodes=9)
        drafter.begin((tokens,), 64)
        for end in range(chunk, 39 + chunk, chunk):
            take_up(drafter, tokens[: min(end, 39) + 1], features, start=end - chunk)
        assert drafter.cache_length(0) == 39
        drafts.append(paths_of(drafter.propose(context_of([tokens]))))
    assert drafts[0] == drafts[1] == drafts[2]


def test_a_step_that_failed_behind_the_drafter_leaves_no_trace() -> None:
    head, (tokens, features) = random_head(EAGLE3), random_text(30, 3)
    drafter = drafter_with(head, width=3, depth=3, nodes=9)
    drafter.begin((tokens,), 64)
    take_up(drafter, tokens[:20], features)
    expected = paths_of(drafter.propose(context_of([tokens[:20]])))
    take_up(drafter, tokens[:26], features, start=19)
    assert drafter.propose(context_of([tokens[:20]])).lengths.tolist() == [0], "what it holds is not what was verified"
    other = [*tokens[:20], *random_text(6, 3, seed=9)[0]]
    take_up(drafter, other, features, start=19)
    assert drafter.cache_length(0) == 25
    fresh = drafter_with(head, width=3, depth=3, nodes=9)
    fresh.begin((other,), 64)
    take_up(fresh, other, features)
    assert paths_of(drafter.propose(context_of([other]))) == paths_of(fresh.propose(context_of([other])))
    assert len(expected) == 9


def test_slots_that_were_never_written_are_never_read() -> None:
    model, inputs = steady_llama(), prompts(3, VOCAB)
    head = agreeing_head(model)

    def poisoned(shape: Any, num_tokens: int) -> PagedKVCache:
        cache = PagedKVCache([shape], 64, 4)
        for plane in cache.planes:
            plane.pages.fill_(torch.nan)
        return cache

    config = EagleDraftConfig(width=3, depth=3, nodes=9)
    counts = []
    for make in (make_pages, poisoned):
        records: list = []
        lent = head.borrow(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        drafter = EagleDrafter(lent, make, config)
        speculative(model, inputs, drafter, max_new_tokens=20, on_step=records.append, **GREEDY)
        counts.append([record.draft_tokens for record in records])
    assert counts[0] == counts[1]


# -- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, r"width=0; accepted: an integer from 1 to 63"),
        ({"depth": 64}, r"depth=64; accepted: an integer from 1 to 63"),
        ({"nodes": 64}, r"nodes=64; accepted: an integer from 1 to 63"),
        ({"nodes": True}, r"nodes=True"),
        ({"vocabulary": 0}, r"vocabulary=0; accepted: an integer ≥ 1"),
        ({"vocabulary": ()}, r"vocabulary=\(\)"),
        ({"min_probability": 1.0}, r"min_probability=1.0; accepted: 0 ≤ p < 1"),
        ({"max_positions": 0}, r"max_positions=0"),
        ({"branches": 3}, r"branches=3: unknown option of EagleDraftConfig; accepted: width, depth, nodes"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EagleDraftConfig.of(**options)


def test_options_that_do_not_suit_the_head_are_named() -> None:
    head = random_head(EAGLE3)
    with pytest.raises(ConfigError, match=r"vocabulary=8: the head does not say which tokens are frequent"):
        drafter_with(head, vocabulary=8)
    head.set_token_order(torch.arange(VOCAB - 1, -1, -1))
    tokens, features = random_text(8, 3)
    drafter = drafter_with(head, vocabulary=8, width=8, depth=1, nodes=8)
    drafter.begin((tokens,), 64)
    take_up(drafter, tokens, features)
    assert sorted(drafter.propose(context_of([tokens])).tokens[0].tolist()) == list(range(VOCAB - 8, VOCAB))
    reduced = random_head(dataclasses.replace(EAGLE3, draft_vocab_size=len(REDUCED)))
    reduced.set_vocabulary(REDUCED)
    with pytest.raises(ConfigError, match=r"the head can draft none of these tokens"):
        drafter_with(reduced, vocabulary=(2, 7))
    with pytest.raises(ConfigError, match=r"sliding_window=4; accepted: more than depth=6"):
        drafter_with(head, sliding_window=4)


def test_no_head_ships_for_a_model_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match=r"no EAGLE head ships for LlamaForCausalLM with hidden size 32, 101 tokens"):
        load_eagle_drafter(None, tiny_llama())
