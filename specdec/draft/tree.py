"""Trees of drafted tokens in plain Python: grown from places where the text stood before, or merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import groupby
from typing import NamedTuple

Nodes = list[tuple[int, int]]
"""`(token, parent)` per node, parents before children; a parent is a window index: 0 the root, `i + 1` node `i`."""

SEPARATOR = -1
"""Stands between texts that were put behind one another; nothing is ever drafted across it."""


class Continuation(NamedTuple):
    """An earlier place where some text went on after what the row's text ends with now."""

    text: Sequence[int]
    start: int
    """Place in `text` of the token that came next; smaller than `len(text)`."""
    match: int
    """Tokens before `start` that equal the last tokens of the row's text; at least 1."""

    def token_after(self, path: tuple[int, ...]) -> int:
        """The token that the continuation proposes behind `path`.

        A continuation that runs into the end of its text reads on in what was drafted, as an overlapping copy does in
        LZ77: a text that has begun to repeat itself is drafted to any depth.
        """
        place = self.start + len(path)
        return self.text[place] if place < len(self.text) else path[place - len(self.text)]


def grow_tree(
    continuations: Iterable[Continuation], max_nodes: int, max_depth: int, min_probability: float = 0.0
) -> Nodes:
    """The tree of the most probable nodes that the continuations propose, best first, none less probable than told.

    The probability of a node is that of its parent × the estimate of `next_tokens`.
    """
    nodes: Nodes = []
    # Entries: (-probability, order of arrival, token, parent, path down to the node, its continuations).  Equal
    # probabilities leave in order of arrival, so the result is a function of the arguments.
    waiting: list[tuple[float, int, int, int, tuple[int, ...], list[Continuation]]] = []
    arrived = 0

    def add_children(parent: int, probability: float, path: tuple[int, ...], members: list[Continuation]) -> None:
        nonlocal arrived
        for token, (share, followers) in next_tokens(members, path).items():
            if token != SEPARATOR and probability * share >= min_probability:
                heappush(waiting, (-probability * share, arrived, token, parent, (*path, token), followers))
                arrived += 1

    if max_depth > 0:
        add_children(0, 1.0, (), sorted(continuations, key=lambda member: -member.match))
    while waiting and len(nodes) < max_nodes:
        negative, _, token, parent, path, members = heappop(waiting)
        nodes.append((token, parent))
        if len(path) < max_depth:
            add_children(len(nodes), -negative, path, members)
    return nodes


def next_tokens(members: list[Continuation], path: tuple[int, ...]) -> dict[int, tuple[float, list[Continuation]]]:
    """Estimated probability of each token that may follow `path`, and the continuations that go on with it.

    Longer matches speak first: a token that c of the n continuations of one match length go on with gets (c - D) / n,
    and what D takes away is left to shorter matches (absolute discounting; Ney, Essen and Kneser 1994).
    `members` come in order of falling match length.
    """
    followers: dict[int, list[Continuation]] = {}
    estimates: dict[int, float] = {}
    left = 1.0
    for match, group in groupby(members, key=lambda member: member.match):
        counts: dict[int, int] = {}
        for member in group:
            token = member.token_after(path)
            counts[token] = counts.get(token, 0) + 1
            followers.setdefault(token, []).append(member)
        total, taken = sum(counts.values()), discount(match + len(path))
        for token, count in counts.items():
            estimates[token] = estimates.get(token, 0.0) + left * (count - taken) / total
        left *= taken * len(counts) / total
    return {token: (estimates[token], following) for token, following in followers.items()}


def discount(match: int) -> float:
    """What one continuation lacks to certainty after a match of that many tokens.

    Fitted to the greedy answers of a small chat model, where the only continuation after 1 / 2 / 4 / 7 matching tokens
    was right in 27 / 48 / 74 / 79% of cases.  The depth at which a draft becomes improbable is then proportional to the
    match length, as in SuffixDecoding (arXiv:2411.04975).
    """
    return 1.5 / (match + 1)


def merge_trees(trees: Iterable[Nodes], max_nodes: int) -> Nodes:
    """One tree of the nodes of all trees, earlier trees first, until the budget is spent; equal paths become one."""
    merged: Nodes = []
    index_of: dict[tuple[int, int], int] = {}
    for tree in trees:
        merged_index: list[int | None] = [0]
        for token, parent in tree:
            above = merged_index[parent]
            merged_index.append(None if above is None else _place(merged, index_of, (token, above), max_nodes))
    return merged


def _place(merged: Nodes, index_of: dict[tuple[int, int], int], node: tuple[int, int], max_nodes: int) -> int | None:
    """Window index of a node in the merged tree, put there if need be; None where no room is left."""
    if node not in index_of and len(merged) < max_nodes:
        merged.append(node)
        index_of[node] = len(merged)
    return index_of.get(node)
