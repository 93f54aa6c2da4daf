"""Growing and merging trees of drafted tokens, against exhaustive enumeration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.tree import SEPARATOR, Continuation, Nodes, discount, grow_tree, merge_trees, next_tokens
from specdec.types import Draft
from tests.drafting import paths_of


def follow(text: list[int], start: int, depth: int) -> tuple[int, ...]:
    """The first `depth` tokens behind `start`, reading on in what was read where the text ends."""
    longer = list(text)
    for place in range(start, start + depth):
        longer.append(longer[place])
    return tuple(longer[start : start + depth])


def every_node(continuations: list[Continuation], max_depth: int) -> dict[tuple[int, ...], float]:
    """Every path the continuations propose, with its estimated probability."""
    found: dict[tuple[int, ...], float] = {}
    for continuation in continuations:
        path = follow(list(continuation.text), continuation.start, max_depth)
        for depth in range(1, max_depth + 1):
            if SEPARATOR in path[:depth] or path[:depth] in found:
                continue
            above = path[: depth - 1]
            members = [c for c in continuations if follow(list(c.text), c.start, depth - 1) == above]
            members.sort(key=lambda member: -member.match)
            share = next_tokens(members, above)[path[depth - 1]][0]
            found[path[:depth]] = found.get(above, 1.0) * share
    return found


texts = st.lists(st.integers(0, 2), min_size=2, max_size=14)


@st.composite
def continuations(draw: st.DrawFn) -> list[Continuation]:
    text = draw(texts)
    starts = draw(st.lists(st.integers(1, len(text) - 1), min_size=1, max_size=4, unique=True))
    return [Continuation(text, start, draw(st.integers(1, 5))) for start in starts]


@given(continuations(), st.integers(0, 9), st.integers(0, 5), st.sampled_from([0.0, 0.05, 0.3]))
def test_the_tree_holds_the_most_probable_nodes(places, max_nodes: int, max_depth: int, least: float) -> None:
    draft = Draft.trees([grow_tree(places, max_nodes, max_depth, least)])
    draft.validate(3)
    paths = paths_of(draft)
    known = every_node(places, max_depth)
    probable = sorted((p for p in known.values() if p >= least), reverse=True)
    assert len(paths) == min(max_nodes, len(probable))
    assert [known[path] for path in paths] == pytest.approx(probable[: len(paths)])


@given(continuations())
def test_estimates_of_the_next_token_leave_something_for_the_unknown(places) -> None:
    estimates = next_tokens(sorted(places, key=lambda place: -place.match), ())
    assert all(share > 0 for share, _ in estimates.values())
    assert sum(share for share, _ in estimates.values()) < 1
    assert sorted(member.start for _, members in estimates.values() for member in members) == sorted(
        place.start for place in places
    )


def test_frequent_continuations_come_first() -> None:
    text = [1, 5, 1, 6, 1, 6, 1, 6, 1]
    places = [Continuation(text, start, 1) for start in (1, 3, 5, 7)]
    estimates = {token: share for token, (share, _) in next_tokens(places, ()).items()}
    assert estimates == pytest.approx({6: (3 - discount(1)) / 4, 5: (1 - discount(1)) / 4})
    assert grow_tree(places, 2, 1) == [(6, 0), (5, 0)]


def test_longer_matches_speak_before_shorter_ones() -> None:
    longer, shorter = Continuation([7, 8], 1, 4), Continuation([7, 9], 1, 1)
    assert grow_tree([shorter, longer], 2, 1) == [(8, 0), (9, 0)]
    left = discount(4)
    assert next_tokens([longer, shorter], ())[9][0] == pytest.approx(left * (1 - discount(1)))


@pytest.mark.parametrize("match", [1, 2, 8])
def test_depth_grows_with_the_match(match: int) -> None:
    text = list(range(100))
    depth = len(grow_tree([Continuation(text, 10, match)], 63, 63, min_probability=0.1))
    assert match < depth <= 4 * match


def test_a_cycle_is_drafted_beyond_the_end_of_the_text() -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    assert [token for token, _ in grow_tree([Continuation(text, 6, 6)], 10, 10)] == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_drafted_across_a_separator() -> None:
    text = [1, 2, SEPARATOR, 3, 4, SEPARATOR]
    assert grow_tree([Continuation(text, 1, 1), Continuation(text, 4, 1)], 10, 10) == [(2, 0), (4, 0)]


@pytest.mark.parametrize(("max_nodes", "max_depth"), [(0, 5), (5, 0), (0, 0)])
def test_no_budget_no_nodes(max_nodes: int, max_depth: int) -> None:
    assert grow_tree([Continuation([1, 2, 3], 1, 3)], max_nodes, max_depth) == []


@st.composite
def trees(draw: st.DrawFn) -> Nodes:
    nodes: Nodes = []
    for _ in range(draw(st.integers(0, 8))):
        node = (draw(st.integers(0, 2)), draw(st.integers(0, len(nodes))))
        if node not in nodes:
            nodes.append(node)
    return nodes


@given(st.lists(trees(), max_size=3), st.integers(0, 20))
def test_merging_keeps_every_path_once_and_the_first_tree_first(several: list[Nodes], max_nodes: int) -> None:
    merged = merge_trees(several, max_nodes)
    draft = Draft.trees([merged])
    draft.validate(3)
    wanted = list(dict.fromkeys(path for tree in several for path in paths_of(Draft.trees([tree]))))
    assert set(paths_of(draft)) <= set(wanted)
    assert len(merged) == min(max_nodes, len(wanted))
    if several and len(several[0]) <= max_nodes:
        assert merged[: len(several[0])] == several[0]


def test_a_node_whose_parent_found_no_room_is_left_out() -> None:
    assert merge_trees([[(1, 0), (2, 1)], [(5, 0), (1, 0), (6, 1), (2, 2), (7, 4)]], 3) == [(1, 0), (2, 1), (5, 0)]
    assert merge_trees([[(1, 0)], [(5, 0), (6, 1), (1, 0), (7, 3)]], 2) == [(1, 0), (5, 0)]
