"""Training-time test: attention of chains, loss and gradient, and what the unrolled steps see."""

from __future__ import annotations

import pytest
import torch

from specdec.errors import ConfigError
from specdec.hf.initial_head import HeadShape, head_config, initial_head
from specdec.hf.teacher import TeacherModel
from specdec.train.acceptance import Texts, chain_acceptance
from specdec.train.chains import chain_attention, chain_attention_reference
from specdec.train.eagle import Batch, TestTimeTraining, test_time_loss, unroll
from specdec.train.losses import Teacher, soft_cross_entropy
from specdec.train.optimise import HeadOptimiser, OptimiserConfig
from tests.models import tiny_llama


@pytest.mark.parametrize("later", [0, 1, 3])
def test_merged_flash_attention_has_the_definitions_gradient(later: int):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3 + 2 * later)]
    q, k0, v0, *rest = tensors
    found = chain_attention(q, k0, v0, 0.3, *rest)
    wanted = chain_attention_reference(q, k0, v0, 0.3, *rest)
    assert torch.allclose(found, wanted, atol=1e-6)
    upstream = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, tensors, upstream), torch.autograd.grad(wanted, tensors, upstream), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-6)


def test_reference_attention_is_causal_and_sees_its_own_chain_only():
    q, k0, v0, k1, v1 = torch.randn(5, 1, 2, 6, 4).unbind(0)
    before = chain_attention_reference(q, k0, v0, 0.5, k1, v1)
    k0[:, :, 4:], v0[:, :, 4:], k1[:, :, 4:], v1[:, :, 4:] = 9.0, 9.0, 9.0, 9.0
    after = chain_attention_reference(q, k0, v0, 0.5, k1, v1)
    assert torch.equal(before[:, :, :4], after[:, :, :4])
    assert not torch.allclose(before[:, :, 4:], after[:, :, 4:])


def test_soft_cross_entropy_is_differentiable_in_hidden_and_weight():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (11, 4)))
    teacher = Teacher.of(torch.randn(3, 11, dtype=torch.float64), sharpness=1.5)
    rows, row_weights = torch.tensor([0, 1, 2, 2, 0]), torch.rand(5, dtype=torch.float64)
    loss, best = soft_cross_entropy(hidden, weight, teacher, rows, row_weights)
    logits = hidden @ weight.T
    p = (teacher.logits[rows] * 1.5).softmax(-1)
    wanted = (-(p * logits.log_softmax(-1)).sum(-1) * row_weights).sum()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert torch.equal(best, logits.argmax(-1))
    for found, expected in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(wanted, (hidden, weight)), strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.fixture
def model():
    return tiny_llama(num_hidden_layers=4, tie_word_embeddings=True)


def test_unrolling_on_the_heads_own_tokens_is_drafting(model):
    """Fed the text that a chain would draft, step `j` of the unrolling predicts the next drafted token."""
    head = initial_head(model, HeadShape())
    tokens = torch.randint(101, (1, 12))
    taps, _ = TeacherModel(model, head.config.taps, 16)(tokens)
    steps = list(unroll(head, tokens, taps, 3, fast=False))
    start = 5
    drafted = head.logits(steps[0][:, start]).argmax(-1)
    forced = torch.cat([tokens[:, : start + 2], drafted[:, None]], dim=1)
    follow = list(unroll(head, forced, tuple(tap[:, : start + 3] for tap in taps), 2, fast=False))
    second = head.logits(follow[1][:, start]).argmax(-1)
    text = torch.cat([forced, second[:, None]], dim=1)
    cut = tuple(tap[:, : text.shape[1]] for tap in taps)
    texts = Texts(text, cut, torch.tensor([start + 1]), torch.tensor([text.shape[1]]))
    assert chain_acceptance(head, texts, 2)[0, start] == 2


def test_loss_ignores_places_of_weight_0_and_chains_before_the_text(model):
    head = initial_head(model, HeadShape())
    tokens = torch.randint(101, (2, 10))
    taps, logits = TeacherModel(model, head.config.taps, 16)(tokens)
    teacher, recipe = Teacher.of(logits.flatten(0, 1)), TestTimeTraining(steps=3)

    def loss(places: list[int], weights: list[float]) -> float:
        batch = Batch(tokens, torch.tensor(places), torch.tensor(weights))
        return test_time_loss(head, batch, taps, teacher, recipe, False, head.lm_head_weight)[0].item()

    assert loss([5, 7, 15], [1, 1, 0]) == pytest.approx(loss([5, 7], [1, 1]), rel=1e-5)
    assert loss([5, 7], [1, 1]) != pytest.approx(loss([5, 15], [1, 1]), rel=1e-3)
    figures = test_time_loss(
        head, Batch(tokens, torch.tensor([1]), torch.ones(1)), taps, teacher, recipe, False, head.lm_head_weight
    )[1]
    assert figures[0, 0] > 0 and figures[1:].abs().sum() == 0  # no chain of two steps can end at token 1


def test_a_head_learns_a_text_by_heart(model):
    head = initial_head(model, HeadShape())
    tokens = torch.randint(101, (4, 16))
    places = torch.tensor([row * 16 + column for row in range(4) for column in range(4, 15)])
    batch = Batch(tokens, places, torch.ones(len(places)))
    teacher = TeacherModel(model, head.config.taps, 16)
    optimiser = HeadOptimiser(
        head, teacher, TestTimeTraining(steps=2), OptimiserConfig(learning_rate=1e-2), torch.float32
    )
    first = optimiser.step(batch, 0.1).clone()
    for _ in range(60):
        last = optimiser.step(batch, 0.1)
    assert (last[:, 0] < 0.7 * first[:, 0]).all()
    assert (last[:, 1] > first[:, 1]).all()
    assert torch.equal(optimiser.working.fc.weight, optimiser.masters.fc.weight)


def test_reduced_vocabulary_masks_places_whose_best_token_is_outside(model):
    head = initial_head(model, HeadShape(draft_vocab_size=40))
    head.set_vocabulary(torch.arange(40))
    tokens = torch.randint(101, (2, 12))
    _, logits = TeacherModel(model, head.config.taps, 16)(tokens)
    best = logits.argmax(-1).flatten()
    outside = (best >= 40).nonzero().flatten()
    outside = outside[outside % 12 > 2]
    assert len(outside) > 0
    optimiser = HeadOptimiser(
        head, TeacherModel(model, head.config.taps, 16), TestTimeTraining(steps=2), OptimiserConfig(), torch.float32
    )
    figures = optimiser.step(Batch(tokens, outside, torch.ones(len(outside))), 0.5)
    assert figures.abs().sum() == 0


def test_started_from_the_last_layer(model):
    """At first the head continues the last tap as the target's last layer would, the token's embedding aside."""
    head = initial_head(model, HeadShape(taps=(3,), norm_before_residual=False))
    tokens = torch.randint(101, (1, 8))
    taps, logits = TeacherModel(model, (3,), 16)(tokens)
    hidden = next(unroll(head, tokens, taps, 1, fast=False))
    assert torch.allclose(head.logits(hidden), logits[:, :-1], atol=1e-4)


def test_wider_mlp_has_no_effect_at_first(model):
    plain, wide = (initial_head(model, HeadShape(mlp_multiple=m)) for m in (1.0, 1.5))
    tokens = torch.randint(101, (1, 8))
    taps, _ = TeacherModel(model, plain.config.taps, 16)(tokens)
    one, other = (next(unroll(head, tokens, taps, 1, fast=False)) for head in (plain, wide))
    assert wide.config.intermediate_size == 72
    assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: TestTimeTraining(steps=0), "steps=0"),
        (lambda: TestTimeTraining(decay=0.0), "decay=0.0"),
        (lambda: TestTimeTraining(later_share=2.0), "later_share=2.0"),
        (lambda: TestTimeTraining(sharpness=0.0), "sharpness=0.0"),
        (lambda: OptimiserConfig(learning_rate=0.0), "learning_rate=0.0"),
        (lambda: OptimiserConfig(warmup_share=1.0), "warmup_share=1.0"),
        (lambda: HeadShape(draft_vocab_size=500).vocabulary_for(101), "draft_vocab_size=500"),
    ],
)
def test_invalid_settings_are_named(make, named: str):
    with pytest.raises(ConfigError, match=named):
        make()


def test_rows_longer_than_the_heads_window_are_refused(model):
    head = initial_head(model, HeadShape(sliding_window=8))
    tokens = torch.randint(101, (1, 12))
    taps, _ = TeacherModel(model, head.config.taps, 16)(tokens)
    with pytest.raises(ConfigError, match="rows of 12 tokens"):
        next(unroll(head, tokens, taps, 1, fast=False))


def test_default_taps_and_vocabulary(model):
    assert HeadShape().taps_for(30) == (2, 9, 16, 22, 29)
    assert head_config(model, HeadShape()).tie_lm_head
    assert HeadShape().vocabulary_for(128_000) == 32_000
