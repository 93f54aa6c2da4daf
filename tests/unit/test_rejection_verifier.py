"""The min(1, p/q) rule: exact in distribution, never a rejected token, nothing damaged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import specdec
from specdec.draft.base import DraftContext, Drafter
from specdec.errors import ConfigError, NonFiniteLogits, UnsupportedError
from specdec.sampling import Sampler
from specdec.types import Draft, Verdict, Window
from specdec.verify.eager import EagerVerifier
from specdec.verify.rejection import RejectionVerifier, acceptance_probability, residual
from tests.models import tiny_llama
from tests.windows import FixedNoise, random_case

V = 16
TRIALS = 4000


def chi_square_limit(freedom: int, z: float = 3.7) -> float:
    """Upper 10⁻⁴ point of the chi-square law (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def fits(tokens: Sequence[int], law: Tensor) -> bool:
    """Chi-square test of observed tokens; those expected fewer than 5 times are put together."""
    counts = Counter(tokens)
    expected = (law * len(tokens)).tolist()
    common = [token for token, count in enumerate(expected) if count >= 5]
    cells = [(counts[token], expected[token]) for token in common]
    rest = len(tokens) - sum(expected[token] for token in common)
    if rest > 1:
        cells.append((len(tokens) - sum(counts[token] for token in common), rest))
    elif len(tokens) != sum(counts[token] for token in common):
        return False
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return statistic < chi_square_limit(len(cells) - 1)


def sampling_sampler(num_rows: int, **options) -> Sampler:
    return Sampler(torch.zeros(num_rows, 1, dtype=torch.long), noise=FixedNoise(torch.ones(num_rows, V)), **options)


def trial_window(p: Tensor, q: Tensor, q_true: Tensor | None = None, seed: int = 0) -> tuple[Tensor, Window]:
    """Many rows with the chain of two tokens sampled from `q[0]`, `q[1]`; the target's logits are those of `p`.

    `q_true` is what tokens are really sampled from, where `q` is a lie.
    """
    random = torch.Generator().manual_seed(seed)
    source = q if q_true is None else q_true
    drafts = torch.stack([torch.multinomial(row, TRIALS, True, generator=random) for row in source], dim=1)
    parents = torch.arange(2).expand(TRIALS, -1)
    draft = Draft(drafts, parents, torch.full((TRIALS,), 2), q.expand(TRIALS, -1, -1))
    rows = tuple(range(TRIALS))
    return p.log().expand(TRIALS, -1, -1), Window.over(
        torch.zeros(TRIALS, dtype=torch.long), draft, rows, (0,) * TRIALS
    )


def distributions(seed: int, sharpness: float, count: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(count, V, generator=random) * sharpness).softmax(-1)


def disjoint() -> tuple[Tensor, Tensor]:
    low, high = torch.zeros(V), torch.zeros(V)
    low[:8], high[8:] = 1 / 8, 1 / 8
    return low.expand(3, -1), high.expand(2, -1)


PAIRS = {
    "alike": (distributions(1, 1.0, 3), distributions(2, 0.3, 2)),
    "sharp target": (distributions(3, 4.0, 3), distributions(4, 0.5, 2)),
    "sharp draft": (distributions(5, 0.5, 3), distributions(6, 2.0, 2)),
    "equal": (distributions(7, 1.0, 3), distributions(7, 1.0, 3)[:2]),
    "disjoint": disjoint(),
}


@pytest.mark.parametrize("name", PAIRS)
def test_emitted_tokens_follow_the_target(name):
    p, q = PAIRS[name]
    logits, window = trial_window(p, q)
    verdict = RejectionVerifier(seed=1).verify(logits, window, sampling_sampler(TRIALS))
    emitted = verdict.emitted(window)
    assert fits([tokens[0] for tokens in emitted], p[0])
    second = [tokens[1] for tokens in emitted if len(tokens) > 1]
    if name == "disjoint":
        assert not second
        return
    assert len(second) > 400 and fits(second, p[1])
    third = [tokens[2] for tokens in emitted if len(tokens) > 2]
    assert len(third) > 60 and fits(third, p[2])
    # Σ min(p, q) of the drafts survive: the most that any rule can accept.
    rate, best = len(second) / TRIALS, float(torch.minimum(p[0], q[0]).sum())
    assert abs(rate - best) < 4 * math.sqrt(0.25 / TRIALS)


@pytest.mark.parametrize("name", ["alike", "sharp draft"])
def test_the_chi_square_test_notices_a_wrong_rule(name):
    p, q = PAIRS[name]
    random = torch.Generator().manual_seed(0)
    assert not fits(torch.multinomial(q[0], TRIALS, True, generator=random).tolist(), p[0])
    # q not normalised over what was sampled from: acceptance inflated, the classic fault
    logits, window = trial_window(p, q * 0.995 + 0.005 * p[:2], q_true=PAIRS["sharp target"][1])
    emitted = RejectionVerifier().verify(logits, window, sampling_sampler(TRIALS)).emitted(window)
    assert not fits([tokens[0] for tokens in emitted], p[0])


@pytest.mark.parametrize("fault", ["zeros", "nan", "not normalised", "zero at the draft"])
def test_a_draft_row_that_explains_nothing_falls_back_to_p(fault):
    """The draft then counts as chosen, not sampled: exact for whatever it is, and never emitted when rejected."""
    p, _ = PAIRS["alike"]
    chosen = 5
    q = torch.zeros(2, V)
    q[:] = {"zeros": 0.0, "nan": float("nan"), "not normalised": 0.7, "zero at the draft": 1 / (V - 1)}[fault]
    if fault == "zero at the draft":
        q[:, chosen] = 0
    certain = torch.zeros(2, V)
    certain[:, chosen] = 1
    logits, window = trial_window(p, q, q_true=certain)
    verdict = RejectionVerifier(seed=3).verify(logits, window, sampling_sampler(TRIALS))
    emitted = verdict.emitted(window)
    assert fits([tokens[0] for tokens in emitted], p[0])
    rejected = [tokens for tokens, kept in zip(emitted, verdict.num_kept.tolist(), strict=True) if kept == 1]
    assert rejected and all(tokens != [chosen] for tokens in rejected)


def test_the_residual_never_holds_the_rejected_token():
    p, q = distributions(1, 2.0, 400), distributions(2, 2.0, 400)
    drafted = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    rest = residual(p, q, drafted)
    assert (rest.gather(1, drafted[:, None]) == 0).all()
    assert (rest >= 0).all() and (rest.sum(1) > 0).all()
    assert (residual(p, p, drafted).gather(1, drafted[:, None]) == 0).all()
    assert (residual(p, p, drafted).sum(1) > 0).all()


def test_acceptance_probability():
    p = torch.tensor([[0.2, 0.3, 0.5]] * 3)
    q = torch.tensor([[0.4, 0.3, 0.3], [0.1, 0.1, 0.8], [float("nan")] * 3])
    assert acceptance_probability(p, q, torch.tensor([0, 1, 2])).tolist() == pytest.approx([0.5, 1.0, 0.5])


def test_tokens_without_mass_are_never_emitted():
    p = distributions(1, 1.0, 3).clone()
    p[:, 11:] = 0
    p = p / p.sum(1, keepdim=True)
    logits, window = trial_window(p, distributions(2, 0.3, 2))
    emitted = RejectionVerifier().verify(logits, window, sampling_sampler(TRIALS)).emitted(window)
    assert max(token for tokens in emitted for token in tokens) < 11


def test_nothing_given_is_changed():
    p, q = PAIRS["alike"]
    logits, window = trial_window(p, q)
    logits, probs = logits.clone(), window.draft_probs.clone()
    RejectionVerifier().verify(logits, window, sampling_sampler(TRIALS))
    assert torch.equal(logits, p.log().expand(TRIALS, -1, -1)) and torch.equal(window.draft_probs, probs)


def test_seeds():
    logits, window = trial_window(*PAIRS["alike"])

    few = slice(0, 60)
    rows, probs = tuple(range(60)), window.draft_probs[few]
    draft = Draft(window.tokens[few, 1:], window.parents[few, 1:], torch.full((60,), 2), probs)
    window = Window.over(window.tokens[few, 0], draft, rows, (0,) * 60)

    def run(seed):
        return RejectionVerifier(seed).verify(logits[few], window, sampling_sampler(60)).emitted(window)

    assert run(1) == run(1) and run(1) != run(2)


def test_greedy_requests_follow_the_law():
    """q(a) = .2, p(a) = .3, p(b) = .5: the ratio would accept a, greedy decoding emits b."""
    logits = torch.tensor([[[0.3, 0.5, 0.2]] * 2]).log()
    draft = Draft(torch.tensor([[0]]), torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[[0.2, 0.4, 0.4]]]))
    window = Window.over(torch.tensor([0]), draft, (0,), (0,))
    verdict = RejectionVerifier().verify(logits, window, Sampler(torch.zeros(1, 1, dtype=torch.long)))
    assert verdict.emitted(window) == [[1]]


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_without_a_distribution_follow_the_law(sampled):
    case = random_case(3, 5, 9, sampled=sampled, agreement=0.8)
    assert case.run(RejectionVerifier()) == case.run(EagerVerifier())


def test_what_cannot_be_verified_is_refused():
    probs = torch.full((1, 2, V), 1 / V)
    tree = Draft(torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), torch.tensor([2]), probs)
    window = Window.over(torch.tensor([0]), tree, (0,), (0,))
    with pytest.raises(UnsupportedError, match="tree"):
        RejectionVerifier().verify(torch.zeros(1, 3, V), window, sampling_sampler(1))
    chain = Draft(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), torch.tensor([2]), probs[..., :9])
    window = Window.over(torch.tensor([0]), chain, (0,), (0,))
    with pytest.raises(ConfigError, match=r"\(1, 2, 9\).*\(1, 2, 16\)"):
        RejectionVerifier().verify(torch.zeros(1, 3, V), window, sampling_sampler(1))
    window = Window.over(torch.tensor([0]), Draft(chain.tokens, chain.parents, chain.lengths, probs), (0,), (0,))
    with pytest.raises(NonFiniteLogits):
        RejectionVerifier().verify(torch.full((1, 3, V), float("nan")), window, sampling_sampler(1))


def test_a_stop_ends_the_row():
    p = torch.full((3, V), 1e-9)
    p[:, 5] = 1.0
    logits, window = trial_window(p / p.sum(1, keepdim=True), p[:2] / p[:2].sum(1, keepdim=True))
    sampler = sampling_sampler(TRIALS, criteria=[lambda ids, _: ids[:, -1] == 5])
    verdict = RejectionVerifier().verify(logits, window, sampler)
    assert verdict.emitted(window) == [[5]] * TRIALS and verdict.stopped.all()


class TableDrafter(Drafter):
    """Samples chains of three from a fixed table of next-token distributions; knows nothing of the target."""

    def __init__(self, table: Tensor, seed: int) -> None:
        self._table = table
        self._random = torch.Generator().manual_seed(seed)

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def begin(self, prompts, max_length) -> None:
        pass

    def fork(self, source, copies) -> None:
        pass

    def propose(self, context: DraftContext) -> Draft:
        last, tokens, probs = context.roots, [], []
        for _ in range(3):
            probs.append(self._table[last])
            last = torch.multinomial(probs[-1], 1, generator=self._random).squeeze(1)
            tokens.append(last)
        lengths = torch.tensor([min(3, most) for most in context.max_nodes])
        parents = torch.arange(3).expand(len(last), -1)
        return Draft(torch.stack(tokens, 1), parents, lengths, torch.stack(probs, 1))

    def observe(self, window: Window, features: tuple[Tensor, ...], verdict: Verdict) -> None:
        pass

    def end(self) -> None:
        pass


def processed_law(model, prompt: list[list[int]]) -> Tensor:
    """Next-token distribution under temperature 0.8, top-k 5, top-p 0.9, worked out by hand."""
    with torch.no_grad():
        scores = model(torch.tensor(prompt)).logits[:, -1].double() / 0.8
    scores = scores.masked_fill(scores < scores.topk(5).values[:, -1:], -torch.inf)
    ordered, order = scores.softmax(-1).sort(descending=True)
    drops = (ordered.cumsum(-1) - ordered >= 0.9).scatter(1, order, ordered.cumsum(-1) - ordered >= 0.9)
    return scores.masked_fill(drops, -torch.inf).softmax(-1)


def test_generation_follows_the_processed_target():
    """Two tokens of many equal prompts against their exact joint law, found by enumeration."""
    model = tiny_llama(vocab_size=V)
    prompt, num_rows = [1, 7, 3], 1000
    first = processed_law(model, [prompt])[0]
    second = processed_law(model, [[*prompt, token] for token in range(V)])
    table = distributions(9, 1.5, V)
    records = []
    output = specdec.generate(
        model,
        torch.tensor([prompt] * num_rows),
        drafter=TableDrafter(table, 4),
        verifier=RejectionVerifier(seed=2),
        on_step=records.append,
        do_sample=True,
        temperature=0.8,
        top_k=5,
        top_p=0.9,
        max_new_tokens=3,
        pad_token_id=0,
    )
    assert sum(record.num_accepted for record in records) > 200
    pairs = [row[0] * V + row[1] for row in output[:, 3:5].tolist()]
    assert fits(pairs, (first[:, None] * second).flatten())
