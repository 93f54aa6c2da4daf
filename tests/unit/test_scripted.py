"""Drafters that are told what the target says."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.scripted import AlwaysWrongDrafter, ScriptedDrafter, SyntheticDrafter, TellingDrafter
from specdec.errors import ConfigError
from tests.drafting import accepted_of, context_of, paths_of

VOCAB = 11
TRUTH = [[(3 * i + 1) % VOCAB for i in range(40)], [(5 * i + 2) % VOCAB for i in range(40)]]


def accepted_at(drafter: TellingDrafter, index: int, row: int = 0, **limits: int) -> int:
    draft = drafter.propose(context_of([[0]], rows=[row], num_generated=index, **limits))
    draft.validate(VOCAB)
    return accepted_of(draft, TRUTH[row][index:])


@pytest.mark.parametrize("siblings", [0, 1, 3])
def test_a_script_is_right_where_it_is_not_spoilt(siblings: int) -> None:
    right = ScriptedDrafter(TRUTH, VOCAB, depth=6, siblings=siblings)
    late = ScriptedDrafter(TRUTH, VOCAB, depth=6, siblings=siblings, wrong_depths=(4,))
    for row in (0, 1):
        assert accepted_at(right, 3, row) == 6
        assert accepted_at(late, 3, row) == 3


def test_siblings_make_a_tree_whose_path_of_truth_comes_last() -> None:
    draft = ScriptedDrafter(TRUTH, VOCAB, depth=3, siblings=2).propose(context_of([[0]]))
    assert draft.parents[0].tolist() == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert len(set(paths_of(draft))) == 9


def test_behind_the_script_nothing_is_drafted() -> None:
    drafter = ScriptedDrafter(TRUTH, VOCAB, depth=6)
    assert accepted_at(drafter, 38) == 2
    draft = drafter.propose(context_of([[0], [0]], num_generated=[40, 0]))
    assert draft.lengths.tolist() == [0, 6]


def test_rows_are_told_apart_when_earlier_ones_have_finished() -> None:
    draft = ScriptedDrafter(TRUTH, VOCAB).propose(context_of([[0]], rows=[1], num_generated=2))
    assert draft.tokens[0].tolist() == TRUTH[1][2:6]


@pytest.mark.parametrize("siblings", [0, 2])
def test_always_wrong_is_never_right(siblings: int) -> None:
    drafter = AlwaysWrongDrafter(TRUTH, VOCAB, depth=5, siblings=siblings)
    for index in range(30):
        draft = drafter.propose(context_of([[0]], num_generated=index))
        assert int(draft.lengths[0]) == 5 * (siblings + 1)
        assert accepted_of(draft, TRUTH[0][index:]) == 0


@pytest.mark.parametrize("rates", [0.6, (0.9, 0.5, 0.2)])
def test_synthetic_acceptance_is_the_one_asked_for(rates) -> None:
    truth = [[i % VOCAB for i in range(4000)]]
    drafter = SyntheticDrafter(truth, VOCAB, depth=5, acceptance=rates, seed=3)
    counts = [
        accepted_of(drafter.propose(context_of([[0]], num_generated=i)), truth[0][i : i + 5]) for i in range(3000)
    ]
    each = [rates] * 5 if isinstance(rates, float) else [*rates, *rates[-1:] * 2]
    expected, reached = 0.0, 1.0
    for rate in each:
        reached *= rate
        expected += reached
    # Five standard errors of 3000 counts between 0 and 5.
    assert statistics.mean(counts) == pytest.approx(expected, abs=5 * statistics.stdev(counts) / 3000**0.5)


@given(st.integers(0, 30), st.integers(0, 1), st.integers(0, 5))
def test_synthetic_drafts_depend_on_seed_row_and_index_alone(index: int, row: int, seed: int) -> None:
    one, other = (SyntheticDrafter(TRUTH, VOCAB, acceptance=0.5, seed=seed) for _ in range(2))
    other.propose(context_of([[0]], num_generated=max(0, index - 1)))
    assert accepted_at(one, index, row) == accepted_at(other, index, row)


def test_seeds_differ_and_extremes_are_exact() -> None:
    def counts(**options) -> list[int]:
        drafter = SyntheticDrafter(TRUTH, VOCAB, depth=4, **options)
        return [accepted_at(drafter, index) for index in range(30)]

    assert counts(acceptance=0.5, seed=0) != counts(acceptance=0.5, seed=1)
    assert set(counts(acceptance=1.0)) == {4}
    assert set(counts(acceptance=0)) == {0}


def test_synthetic_drafters_say_so() -> None:
    label = SyntheticDrafter(TRUTH, VOCAB, acceptance=0.7, seed=4).label
    assert label.startswith("synthetic(acceptance=[0.7]") and "seed=4" in label


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScriptedDrafter([[VOCAB]], VOCAB), r"continuations\[0\]=11; accepted: an integer from 0 to 10"),
        (lambda: ScriptedDrafter(TRUTH, VOCAB, depth=64), "depth=64"),
        (lambda: ScriptedDrafter(TRUTH, VOCAB, siblings=10), "siblings=10; accepted: an integer from 0 to 9"),
        (lambda: ScriptedDrafter(TRUTH, VOCAB, wrong_depths=(0,)), "wrong_depths=0"),
        (lambda: SyntheticDrafter(TRUTH, VOCAB, acceptance=1.2), r"acceptance=1\.2"),
        (lambda: SyntheticDrafter(TRUTH, VOCAB, acceptance=()), r"acceptance=\(\)"),
    ],
)
def test_invalid_options_are_refused_by_name(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
