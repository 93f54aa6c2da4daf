"""Prompt lookup against a brute-force search of the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.ngram import NGramConfig, NGramDrafter, NGramIndex
from specdec.errors import ConfigError
from tests.drafting import accepted_of, context_of, paths_of


def brute_force(text: list[int], min_size: int, max_size: int, limit: int) -> list[tuple[int, int]]:
    found: dict[int, int] = {}
    for size in range(max_size, min_size - 1, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if text[place - size : place] == text[-size:] and len(found) < limit:
                found.setdefault(place, size)
    return list(found.items())


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
def test_the_index_finds_what_a_search_finds(text: list[int], min_size: int, more: int, limit: int) -> None:
    index = NGramIndex(min_size, min_size + more)
    for token in text:
        index.append(token)
    assert index.matches(limit) == brute_force(text, min_size, min_size + more, limit)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_a_copy_grows_on_its_own(text: list[int], more: list[int]) -> None:
    index = NGramIndex(1, 3)
    for token in text:
        index.append(token)
    twin = index.copy()
    for token in more:
        twin.append(token)
    assert index.matches(9) == brute_force(text, 1, 3, 9)
    assert twin.matches(9) == brute_force(text + more, 1, 3, 9)


def draft_paths(text: list[int], **options) -> list[tuple[int, ...]]:
    drafter = NGramDrafter.of(**options)
    drafter.begin((text,), 1000)
    return paths_of(drafter.propose(context_of([text])))


def test_the_longest_match_wins() -> None:
    text = [1, 2, 3, 7, 8, 9, 3, 4, 5, 6, 1, 2, 3]
    assert draft_paths(text, max_branches=1, num_drafts=3) == [(7,), (7, 8), (7, 8, 9)]
    assert draft_paths(text, max_branches=1, num_drafts=3, max_size=1) == [(4,), (4, 5), (4, 5, 6)]


def test_several_matches_are_branches_of_one_tree() -> None:
    text = [1, 2, 10, 11, 1, 2, 20, 21, 1, 2, 10, 12, 1, 2]
    paths = draft_paths(text, max_size=2, max_branches=3, num_drafts=5)
    assert {(10,), (20,)} <= set(paths)
    assert {(10, 11), (10, 12)} <= set(paths) and paths.count((10,)) == 1


def test_no_match_no_draft() -> None:
    assert draft_paths([1, 2, 3, 4]) == []
    assert draft_paths([5]) == []
    assert draft_paths([1, 2, 3, 4, 2], min_size=2, max_size=2) == []


def test_history_with_end_tokens_is_copied_like_any_other() -> None:
    assert draft_paths([5, 6, 2, 7, 5, 6], max_branches=1, num_drafts=2) == [(2,), (2, 7)]


def test_a_drafter_is_reused_for_a_shorter_prompt() -> None:
    drafter = NGramDrafter()
    long, short = list(range(50)) * 4, [3, 4, 5, 3]
    drafter.begin((long,), 1000)
    assert accepted_of(drafter.propose(context_of([long])), range(10)) == 10
    drafter.end()
    drafter.begin((short,), 1000)
    assert paths_of(drafter.propose(context_of([short])))[:2] == [(4,), (4, 5)]


def test_a_shrinking_text_is_refused() -> None:
    drafter = NGramDrafter()
    drafter.begin(([1, 2, 3],), 1000)
    drafter.propose(context_of([[1, 2, 3]]))
    with pytest.raises(ConfigError, match="row of 2 tokens after 3"):
        drafter.propose(context_of([[1, 2]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_size": 0}, "min_size=0"),
        ({"min_size": 3, "max_size": 2}, "max_size=2; accepted: an integer ≥ 3"),
        ({"num_drafts": 64}, "num_drafts=64; accepted: an integer from 1 to 63"),
        ({"max_branches": 0}, "max_branches=0"),
        ({"max_size": 2.0}, r"max_size=2\.0"),
        ({"max_size": True}, "max_size=True"),
        ({"ngram": 2}, "ngram=2: unknown option of NGramConfig; accepted: min_size"),
    ],
)
def test_invalid_options_are_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NGramDrafter.of(**options)


def test_the_configuration_is_kept() -> None:
    config = NGramConfig(max_size=2)
    assert NGramDrafter(config).config is config
