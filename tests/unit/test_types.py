"""Drafts, windows and verdicts against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import ConfigError
from specdec.types import MAX_WINDOW, CommitStats, Draft, StepRecord, Verdict, Window, ancestors_of, depths_of

Tree = list[tuple[int, int]]


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12, vocab: int = 7) -> Tree:
    """Nodes with random parents before them, siblings distinct."""
    nodes: Tree = []
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(0, len(nodes)))
        taken = {token for token, above in nodes if above == parent}
        if free := [token for token in range(vocab) if token not in taken]:
            nodes.append((draw(st.sampled_from(free)), parent))
    return nodes


def path_to(parents: list[int], node: int) -> list[int]:
    """Window nodes from the root down to `node`."""
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


def window_of(rows: list[Tree], contexts: list[int] | None = None) -> Window:
    roots = torch.arange(len(rows)) + 100
    lengths = tuple(contexts or [5 + 3 * i for i in range(len(rows))])
    return Window.over(roots, Draft.trees(rows), tuple(range(len(rows))), lengths)


@given(st.lists(trees(), min_size=1, max_size=4))
def test_trees_are_padded_and_valid(rows: list[Tree]) -> None:
    draft = Draft.trees(rows)
    draft.validate(7)
    width = max(map(len, rows))
    assert draft.tokens.shape == draft.parents.shape == (len(rows), width)
    assert draft.lengths.tolist() == [len(row) for row in rows]
    for i, row in enumerate(rows):
        both = list(zip(draft.tokens[i].tolist(), draft.parents[i].tolist(), strict=True))
        assert both == row + [(0, 0)] * (width - len(row))


@given(st.lists(trees(), min_size=1, max_size=4))
def test_depths_positions_and_masks_equal_brute_force(rows: list[Tree]) -> None:
    window = window_of(rows)
    for i, row in enumerate(rows):
        parents = [0] + [parent for _, parent in row]
        assert int(window.num_nodes[i]) == len(parents)
        assert window.deepest[i] == max(len(path_to(parents, node)) - 1 for node in range(len(parents)))
        for node in range(len(parents)):
            path = path_to(parents, node)
            assert int(window.depths[i, node]) == len(path) - 1
            assert int(window.positions[i, node]) == window.context_lengths[i] + len(path) - 1
            seen = window.ancestors[i, node].nonzero().flatten().tolist()
            assert seen == path
            assert int(window.ancestor_bits[i, node]) == sum(1 << ancestor for ancestor in path)
    assert torch.equal(window.not_ancestors, ~window.ancestors)


@given(st.lists(trees(), min_size=1, max_size=3))
def test_is_chain_promises_exactly_chains(rows: list[Tree]) -> None:
    window = window_of(rows)
    assert window.is_chain == all(parent == i for row in rows for i, (_, parent) in enumerate(row))


def test_a_chain_is_the_tree_in_which_each_node_hangs_on_the_one_before() -> None:
    chain, tree = Draft.chains([[5, 6, 7], [], [8]]), Draft.trees([[(5, 0), (6, 1), (7, 2)], [], [(8, 0)]])
    assert torch.equal(chain.tokens, tree.tokens) and torch.equal(chain.parents, tree.parents)
    assert chain.lengths.tolist() == [3, 0, 1]
    assert Window.over(torch.tensor([1, 2, 3]), chain, (0, 1, 2), (4, 4, 4)).is_chain


@pytest.mark.parametrize("rows", [1, 3])
def test_an_empty_draft_is_plain_decoding(rows: int) -> None:
    draft = Draft.empty(rows)
    draft.validate(10)
    window = Window.over(torch.arange(rows), draft, tuple(range(rows)), (7,) * rows)
    assert window.width == 1 and window.is_chain and window.deepest == [0] * rows
    assert window.positions.tolist() == [[7]] * rows
    assert window.ancestor_bits.tolist() == [[1]] * rows


def test_the_packed_mask_holds_64_nodes_and_no_more() -> None:
    full = window_of([[(i, i) for i in range(MAX_WINDOW - 1)]])
    bits = full.ancestor_bits[0].tolist()
    assert [b & (2**64 - 1) for b in bits] == [(1 << (node + 1)) - 1 for node in range(64)]
    with pytest.raises(ConfigError, match="65 nodes"):
        _ = Window.chain([list(range(65))], (0,), (0,), "cpu").ancestor_bits


def test_the_highest_bit_of_a_branching_mask() -> None:
    star = window_of([[(i, 0) for i in range(MAX_WINDOW - 1)]])
    assert not star.is_chain
    assert [b & (2**64 - 1) for b in star.ancestor_bits[0].tolist()] == [1] + [1 | 1 << node for node in range(1, 64)]


@pytest.mark.parametrize(
    ("tokens", "parents", "lengths", "message"),
    [
        ([[1, 2]], [[0, 2]], [2], "parent 2; accepted: 0 to 1"),
        ([[1, 2]], [[0, -1]], [2], "parent -1"),
        ([[1, 9]], [[0, 1]], [2], "token 9; accepted: 0 to 8"),
        ([[1, -1]], [[0, 1]], [2], "token -1"),
        ([[1, 1]], [[0, 0]], [2], "stands twice under 0"),
        ([[1, 2]], [[0, 1]], [3], "3 of 2 nodes"),
        ([[1, 2]], [[0, 1]], [-1], "-1 of 2 nodes"),
    ],
)
def test_broken_drafts_are_refused(tokens: list, parents: list, lengths: list, message: str) -> None:
    draft = Draft(torch.tensor(tokens), torch.tensor(parents), torch.tensor(lengths))
    with pytest.raises(ConfigError, match=message):
        draft.validate(9)


def test_padding_is_not_looked_at() -> None:
    Draft(torch.tensor([[1, -1], [1, 2]]), torch.tensor([[0, 77], [0, 1]]), torch.tensor([1, 2])).validate(9)


def test_more_than_63_nodes_are_refused() -> None:
    Draft.chains([[1, 2] * 31 + [1]]).validate(9)
    with pytest.raises(ConfigError, match="64 of 64 nodes"):
        Draft.chains([[1, 2] * 32]).validate(9)


def test_a_prefill_is_a_chain_of_unequal_rows() -> None:
    window = Window.chain([[4, 5, 6], [7]], (2, 0), (10, 0), "cpu")
    assert window.tokens.tolist() == [[4, 5, 6], [7, 0, 0]]
    assert window.num_nodes.tolist() == [3, 1] and window.deepest == [2, 0]
    assert window.positions[0].tolist() == [10, 11, 12] and int(window.positions[1, 0]) == 0
    verdict = Verdict.keep_all(window, torch.tensor([8, 9]))
    assert verdict.path.tolist() == [[0, 1, 2], [0, -1, -1]]
    assert verdict.num_kept.tolist() == [3, 1] and verdict.stopped.tolist() == [False, False]
    assert verdict.emitted(window) == [[5, 6, 8], [9]]


def test_keep_all_refuses_trees() -> None:
    with pytest.raises(ConfigError, match="chains"):
        Verdict.keep_all(window_of([[(1, 0), (2, 0)]]), torch.tensor([0]))


@given(st.lists(trees(), min_size=1, max_size=4), st.data())
def test_emitted_tokens_are_those_on_the_path_and_the_next(rows: list[Tree], data: st.DataObject) -> None:
    window = window_of(rows)
    paths, expected = [], []
    for i, row in enumerate(rows):
        node = data.draw(st.integers(0, len(row)))
        paths.append(path_to([0] + [parent for _, parent in row], node))
        expected.append([row[kept - 1][0] for kept in paths[-1][1:]] + [40 + i])
    longest = max(map(len, paths))
    verdict = Verdict(
        path=torch.tensor([path + [-1] * (longest - len(path)) for path in paths]),
        num_kept=torch.tensor([len(path) for path in paths]),
        next_tokens=torch.arange(len(rows)) + 40,
        stopped=torch.zeros(len(rows), dtype=torch.bool),
    )
    assert verdict.emitted(window) == expected


@given(trees(max_nodes=20))
def test_depths_and_ancestors_agree(tree: Tree) -> None:
    parents = torch.tensor([[0] + [parent for _, parent in tree]])
    assert torch.equal(ancestors_of(parents).sum(-1), depths_of(parents) + 1)


def test_rejected_rows_are_the_staged_ones_that_were_not_kept() -> None:
    assert CommitStats(rows_staged=9, rows_committed=4, bytes_written=64).rows_rejected == 5


def test_a_record_counts_its_drafts() -> None:
    record = StepRecord(
        index=0,
        rows=(0, 1),
        roots=[1, 2],
        draft_tokens=[[3, 4, 5], []],
        draft_parents=[[0, 1, 2], []],
        accepted_nodes=[[1, 2], []],
        emitted=[[3, 4, 9], [7]],
        stopped=[False, True],
        commit=CommitStats(5, 4, 0),
        timings_ms={},
    )
    assert (record.num_drafted, record.num_accepted) == (3, 2)
