"""`VectorizedVerifier` gives the eager verdict for equal noise, whatever the windows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import NonFiniteLogits
from specdec.sampling import Sampler
from specdec.types import Draft, Window
from specdec.verify.eager import EagerVerifier
from specdec.verify.vectorized import NEEDS_PREFIX, VectorizedVerifier
from specdec.verify.walk import kept_nodes, path_of
from tests.windows import random_case, stops_at, temperature

VARIANTS = {
    "greedy": {},
    "sampled": {"sampled": True, "history": 3},
    "processed": {"sampled": True, "processors": [temperature(0.6)], "scores_only": True},
    "greedy, processed": {"processors": [temperature(-1.0)], "scores_only": True},
    "stops": {"criteria": [stops_at(3, 5)], "history": 4},
    "sampled stops": {"sampled": True, "criteria": [stops_at(1, 2)]},
    "lockstep": {"lockstep": True},
    "lockstep with stops": {"lockstep": True, "criteria": [stops_at(3)], "agreement": 1.0},
    "nobody ends alone": {"lockstep": True, "stop_together": True, "criteria": [stops_at(3)]},
}


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    seed=st.integers(0, 2**31),
    num_rows=st.integers(1, 9),
    num_drafts=st.integers(0, 20),
    chain=st.booleans(),
    agreement=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
)
@settings(max_examples=12, deadline=None)
def test_equal_noise_gives_the_eager_verdict(variant, seed, num_rows, num_drafts, chain, agreement):
    options = {"agreement": agreement, **VARIANTS[variant]}
    case = random_case(seed, num_rows, num_drafts, chain=chain, **options)
    verifier = VectorizedVerifier()
    assert case.run(verifier) == case.run(EagerVerifier())
    assert not verifier.delegations


@given(seed=st.integers(0, 2**31), chain=st.booleans(), agreement=st.sampled_from([0.5, 0.97, 1.0]))
@settings(max_examples=3, deadline=None)
def test_widest_batch(seed, chain, agreement):
    case = random_case(seed, 64, 63, chain=chain, agreement=agreement, sampled=True)
    assert case.run(VectorizedVerifier()) == case.run(EagerVerifier())


def test_deep_acceptance_happens_in_these_cases():
    case = random_case(3, 8, 20, chain=True, agreement=1.0)
    result = case.run(VectorizedVerifier())
    assert max(map(len, result["paths"])) > 10 and min(map(len, result["paths"])) < 5


@pytest.mark.parametrize("verifier", [EagerVerifier(), VectorizedVerifier()])
def test_a_stop_inside_the_kept_path_cuts_it(verifier):
    logits = torch.full((1, 4, 9), -5.0)
    for node, token in enumerate((4, 7, 2, 1)):
        logits[0, node, token] = 5.0
    window = Window.over(torch.tensor([0]), Draft.chains([[4, 7, 2]]), (0,), (0,))
    sampler = Sampler(torch.zeros(1, 1, dtype=torch.long), criteria=[stops_at(7)])
    verdict = verifier.verify(logits, window, sampler)
    assert verdict.emitted(window) == [[4, 7]]
    assert verdict.path.tolist() == [[0, 1]] and verdict.stopped.tolist() == [True]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("verifier", [EagerVerifier(), VectorizedVerifier()])
def test_nan_logits_raise_at_visited_nodes_only(verifier, sampled):
    case = random_case(11, 3, 6, chain=True, agreement=1.0, sampled=sampled)
    num_nodes = case.window.num_nodes.tolist()
    row = num_nodes.index(max(num_nodes))
    wrong = case.window.tokens.clone()
    wrong[row, 2] = (wrong[row, 2] + 1) % 13
    case.window = Window.over(
        wrong[:, 0], Draft(wrong[:, 1:], case.window.parents[:, 1:], case.window.num_nodes - 1), (0, 1, 2), (0, 0, 0)
    )
    expected = case.run(EagerVerifier())
    case.logits[row, 3:] = float("nan")
    assert case.run(verifier) == expected, "nodes behind a mismatch are not looked at"
    case.logits[row, 1] = float("nan")
    with pytest.raises(NonFiniteLogits):
        case.run(verifier)


def test_processors_that_need_the_text_go_the_eager_way_and_are_counted():
    def no_repeats(ids, scores):
        return scores.scatter(1, ids, -torch.inf)

    case = random_case(5, 4, 8, processors=[no_repeats])
    verifier = VectorizedVerifier()
    assert case.run(verifier) == case.run(EagerVerifier())
    assert verifier.delegations == {NEEDS_PREFIX: 1}


@pytest.mark.parametrize("lockstep", [False, True])
def test_recorded_scores_and_logits_are_those_of_the_eager_walk(lockstep):
    options = dict(sampled=True, processors=[temperature(0.5)], scores_only=True, lockstep=lockstep)
    case = random_case(8, 4, 9, agreement=0.9, keep_scores=True, keep_logits=True, **options)
    recorded = []
    for verifier in (EagerVerifier(), VectorizedVerifier()):
        sampler = case.make_sampler()
        verifier.verify(case.logits, case.window, sampler)
        recorded.append((sampler.scores, sampler.logits))
    assert sum(map(len, recorded[0][0])) >= 4
    for eager, vectorized in zip(*recorded, strict=True):
        for row, other in zip(eager, vectorized, strict=True):
            assert len(row) == len(other)
            assert all(torch.equal(a, b) for a, b in zip(row, other, strict=True))


def test_kept_nodes_need_all_their_ancestors():
    # 0 ─ 1 ─ 3, 0 ─ 2: node 1 does not match, so 3 falls with it though it bears its parent's pick.
    tokens, parents = torch.tensor([[0, 5, 6, 8]]), torch.tensor([[0, 0, 0, 1]])
    kept = kept_nodes(tokens, parents, torch.tensor([4]), torch.tensor([[6, 8, 1, 1]]), is_chain=False)
    assert kept.tolist() == [[True, False, True, False]]
    assert path_of(kept).tolist() == [[0, 2, -1, -1]]
