"""`SpecStats` against steps written by hand and steps of a real loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import pytest
import torch
from torch import Tensor

import specdec
from specdec.draft.base import DraftContext, Drafter
from specdec.stats import SpecStats
from specdec.types import CommitStats, Draft, StepRecord, Verdict, Window
from tests.models import tiny_llama


def step(drafts: list[int], parents: list[int], accepted: list[int], following: int, **timings: float) -> StepRecord:
    """A step of one row whose root is 1."""
    return StepRecord(
        index=0,
        rows=(0,),
        roots=[1],
        draft_tokens=[drafts],
        draft_parents=[parents],
        accepted_nodes=[accepted],
        emitted=[[*(drafts[node - 1] for node in accepted), following]],
        stopped=[False],
        commit=CommitStats(rows_staged=len(drafts) + 1, rows_committed=len(accepted) + 1, bytes_written=100),
        timings_ms=timings,
    )


def test_counts_of_chains() -> None:
    stats = SpecStats.of([step([5, 6, 7], [0, 1, 2], [1, 2], 9), step([5, 6], [0, 1], [], 9), step([], [], [], 4)])
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted) == (3, 5, 2, 5)
    assert stats.tau == pytest.approx(5 / 3)
    assert stats.acceptance == pytest.approx(2 / 5)
    assert (stats.rows_staged, stats.rows_committed, stats.rows_rejected, stats.bytes_written) == (8, 5, 3, 300)


def test_acceptance_by_depth_is_conditional() -> None:
    first = step([5, 6, 7], [0, 1, 2], [1, 2], 9)  # depth 3 rejected
    second = step([5, 6], [0, 1], [1, 2], 9)  # all accepted; nothing drafted at depth 3
    third = step([5, 6], [0, 1], [], 9)  # depth 1 rejected
    assert SpecStats.of([first, second, third]).acceptance_by_depth == [2 / 3, 1.0, 0.0]


def test_tree_depths_follow_the_kept_path() -> None:
    tree = step([5, 6, 7, 8], [0, 0, 1, 2], [2, 4], 9)  # 6 under the root, then 8 under it
    stats = SpecStats.of([tree])
    assert stats.acceptance_by_depth == [1.0, 1.0]
    branch_without_children = step([5, 6, 7], [0, 0, 1], [2], 9)
    assert SpecStats.of([branch_without_children]).acceptance_by_depth == [1.0]


def test_a_stop_on_a_met_draft_is_no_rejection() -> None:
    assert SpecStats.of([step([5, 6], [0, 1], [1], 6)]).acceptance_by_depth == [1.0]


def test_merge_equals_adding_all() -> None:
    steps = [
        step([5, 6], [0, 1], [1], 9, draft=1.0, target=4.0, verify=2.0),
        step([], [], [], 4, target=3.0, commit=0.5),
    ]
    merged = SpecStats.of(steps[:1])
    merged.merge(SpecStats.of(steps[1:]))
    assert merged == SpecStats.of(steps)
    assert merged.to_dict() == SpecStats.of(steps).to_dict()


def test_phase_costs() -> None:
    stats = SpecStats.of(
        [step([5, 6], [0, 1], [1], 9, draft=1.0, target=4.0, verify=2.0), step([], [], [], 4, target=3.0)]
    )
    assert stats.phase_ms("target") == pytest.approx(3.5)
    assert stats.phase_ms("draft", "verify") == pytest.approx(1.5)
    assert stats.step_ms == pytest.approx(5.0)
    assert {width: cost.mean_ms for width, cost in stats.target_by_width.items()} == {3: 6.0, 1: 3.0}


def test_empty_stats_divide_by_nothing() -> None:
    stats = SpecStats()
    assert (stats.tau, stats.acceptance, stats.acceptance_by_depth, stats.step_ms) == (0.0, 0.0, [], 0.0)


def test_summary_line() -> None:
    line = SpecStats.of([step([5, 6, 7], [0, 1, 2], [1, 2], 9)]).summary(0.5, "suffix")
    assert line == "3 tokens · 6.0 tokens/s · τ 3.00 · acceptance 67% · drafter suffix"
    assert "nothing drafted" in SpecStats.of([step([], [], [], 4)]).summary(0.5, "none")


@final
class Oracle(Drafter):
    """Drafts a chain of the five tokens that greedy decoding is going to emit."""

    def __init__(self, continuations: list[list[int]]) -> None:
        self._continuations = continuations

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        pass

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        pass

    def propose(self, context: DraftContext) -> Draft:
        starts = zip(context.rows, context.num_generated, strict=True)
        return Draft.chains([self._continuations[row][start : start + 5] for row, start in starts])

    def observe(self, window: Window, features: tuple[Tensor, ...], verdict: Verdict) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize("num_rows", [1, 3])
def test_accepted_and_rounds_make_up_what_was_emitted(num_rows: int) -> None:
    model = tiny_llama()
    prompts = torch.arange(5, 5 + 6 * num_rows).reshape(num_rows, 6)
    texts = model.generate(prompts, max_new_tokens=40, do_sample=False)[:, 6:].tolist()
    # A token first emitted in the middle of a run of accepted drafts, where a stop cuts the step short.
    stop_at = next(token for i, token in enumerate(texts[0]) if i > 6 and i % 6 == 3 and token not in texts[0][:i])
    steps: list[StepRecord] = []
    options = dict(max_new_tokens=40, do_sample=False, eos_token_id=[stop_at], pad_token_id=0)
    out = specdec.generate(model, prompts, drafter=Oracle(texts), on_step=steps.append, **options)
    stats = SpecStats.of(steps)
    assert stats.accepted + stats.row_rounds == stats.emitted
    assert num_rows > 1 or stats.emitted == out.shape[1] - prompts.shape[1]
    assert set(stats.acceptance_by_depth) == {1.0}
    assert stats.accepted < stats.drafted  # the stop cut a step short
    assert stats.rows_committed == stats.emitted
    assert set(stats.phases) == {"draft", "target", "verify", "observe", "commit"}
