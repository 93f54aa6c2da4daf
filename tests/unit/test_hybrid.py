"""Two drafters in one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft.base import DraftContext, Drafter
from specdec.draft.hybrid import HybridDrafter
from specdec.draft.scripted import ScriptedDrafter
from specdec.draft.suffix import SuffixDrafter
from specdec.errors import ConfigError
from specdec.types import Draft, Verdict, Window
from tests.drafting import accepted_of, context_of, paths_of

VOCAB = 11


@final
class Recording(Drafter):
    """Proposes a fixed chain and remembers every call."""

    def __init__(self, chain: list[int], taps: tuple[int, ...] = (), fails_to_end: bool = False) -> None:
        self._chain = chain
        self._taps = taps
        self._fails_to_end = fails_to_end
        self.calls: list[tuple] = []

    @property
    def taps(self) -> tuple[int, ...]:
        return self._taps

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        self.calls.append(("begin", prompts, max_length))

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        self.calls.append(("fork", source, copies))

    def propose(self, context: DraftContext) -> Draft:
        self.calls.append(("propose", context.max_nodes))
        limits = zip(context.max_nodes, context.max_depths, strict=True)
        return Draft.chains([self._chain[: min(limit)] for limit in limits])

    def observe(self, window: Window, features: tuple[Tensor, ...], verdict: Verdict) -> None:
        self.calls.append(("observe", features))

    def end(self) -> None:
        self.calls.append(("end",))
        if self._fails_to_end:
            raise RuntimeError("cannot end")


def test_every_path_of_both_is_in_the_tree_once() -> None:
    hybrid = HybridDrafter(Recording([1, 2, 3]), Recording([1, 2, 5, 6]))
    draft = hybrid.propose(context_of([[0]]))
    assert paths_of(draft) == [(1,), (1, 2), (1, 2, 3), (1, 2, 5), (1, 2, 5, 6)]
    draft.validate(VOCAB)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(0, 2),
)
def test_the_budget_of_each_row_holds(limits: list[tuple[int, int]], share: int, siblings: int) -> None:
    truth = [[i % VOCAB for i in range(30)]] * len(limits)
    other = [[i % 7 for i in range(2, 32)]] * len(limits)
    hybrid = HybridDrafter(
        ScriptedDrafter(truth, VOCAB, depth=8, siblings=siblings), ScriptedDrafter(other, VOCAB, depth=8), share
    )
    nodes, depths = zip(*limits, strict=True)
    draft = hybrid.propose(context_of([[0]] * len(limits), max_nodes=nodes, max_depths=depths))
    draft.validate(VOCAB)
    for row, (most, deepest) in enumerate(limits):
        paths = paths_of(draft, row)
        assert len(paths) <= most
        assert max(map(len, paths), default=0) <= deepest


def test_a_silent_secondary_leaves_the_whole_budget() -> None:
    primary, secondary = Recording([1, 2, 3]), Recording([])
    HybridDrafter(primary, secondary).propose(context_of([[0], [0]], max_nodes=[9, 4]))
    assert secondary.calls == [("propose", (4, 2))] and primary.calls == [("propose", (9, 4))]


def test_a_speaking_secondary_takes_at_most_its_share() -> None:
    primary, secondary = Recording([1, 2, 3]), Recording([4] * 30)
    HybridDrafter(primary, secondary, secondary_nodes=5).propose(context_of([[0], [0]], max_nodes=[20, 6]))
    assert secondary.calls == [("propose", (5, 3))] and primary.calls == [("propose", (15, 3))]


def test_the_suffix_branch_is_accepted_where_the_primary_is_wrong() -> None:
    text = [7, 8, 9, 3, 4, 5, 6, 7, 8, 9]
    truth = [[3, 4, 5, 6]]
    wrong = ScriptedDrafter(truth, VOCAB, depth=4, wrong_depths=(1,))
    hybrid = HybridDrafter(wrong, SuffixDrafter())
    hybrid.begin((text,), 100)
    context = context_of([text])
    assert accepted_of(wrong.propose(context), truth[0]) == 0
    draft = hybrid.propose(context)
    assert accepted_of(draft, truth[0]) == 4
    assert (4,) in paths_of(draft)


def test_calls_reach_both_and_features_reach_their_owner() -> None:
    primary, secondary = Recording([1], taps=(2, 5)), Recording([2], taps=(-1,))
    hybrid = HybridDrafter(primary, secondary)
    assert hybrid.taps == (2, 5, -1)
    hybrid.begin(([1, 2], [1, 2]), 50)
    hybrid.fork(0, (1,))
    window = Window.chain([[1]], (0,), (0,), "cpu")
    features = tuple(torch.full((1, 1, 4), float(i)) for i in range(3))
    hybrid.observe(window, features, Verdict.keep_all(window, torch.tensor([2])))
    hybrid.end()
    for drafter, own in ((primary, features[:2]), (secondary, features[2:])):
        assert drafter.calls == [("begin", ([1, 2], [1, 2]), 50), ("fork", 0, (1,)), ("observe", own), ("end",)]


def test_the_secondary_ends_though_the_primary_fails_to() -> None:
    secondary = Recording([])
    with pytest.raises(RuntimeError, match="cannot end"):
        HybridDrafter(Recording([], fails_to_end=True), secondary).end()
    assert secondary.calls == [("end",)]


@final
class Sampling(Drafter):
    """Claims that its drafts were sampled."""

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None: ...

    def fork(self, source: int, copies: tuple[int, ...]) -> None: ...

    def propose(self, context: DraftContext) -> Draft:
        return replace(Draft.chains([[1]]), probs=torch.ones(1, 1, VOCAB) / VOCAB)

    def observe(self, window: Window, features: tuple[Tensor, ...], verdict: Verdict) -> None: ...

    def end(self) -> None: ...


def test_sampled_drafts_are_refused() -> None:
    with pytest.raises(ConfigError, match="probs"):
        HybridDrafter(Sampling(), Recording([1])).propose(context_of([[0]]))


def test_an_invalid_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="secondary_nodes=0"):
        HybridDrafter(Recording([]), Recording([]), secondary_nodes=0)
