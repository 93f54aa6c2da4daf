"""Any drafter, with its budget chosen by a controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

from jaxtyping import Float
from torch import Tensor

from specdec.draft.base import DraftContext, Drafter
from specdec.draft.budget import BudgetController, CostModelController, Outcome
from specdec.types import Draft, Verdict, Window


@final
class AdaptiveDrafter(Drafter):
    """Asks the inner drafter for as many nodes as the controller thinks right, and not at all where that is none.

    The time from the proposal to the observation is the step's cost: it holds drafting, target forward and
    verification, whose host read ends whatever runs asynchronously.
    """

    def __init__(
        self,
        drafter: Drafter,
        controller: BudgetController | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Args:
        controller: None takes a `CostModelController`; it keeps what it has learnt from one generation to the next.
        """
        self.controller = controller or CostModelController()
        self.inner = drafter
        self._clock = clock
        self._proposed: tuple[float, list[int]] | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> Sequence[int] | None:
        self._proposed = None
        return self.inner.begin(prompts, max_length)

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        self.inner.fork(source, copies)

    def propose(self, context: DraftContext) -> Draft:
        start = self._clock()
        budget = self.controller.choose(len(context.rows))
        wanted = tuple(min(budget, most) for most in context.max_nodes)
        if any(wanted):
            draft = self.inner.propose(replace(context, max_nodes=wanted))
        else:
            draft = Draft.empty(len(context.rows), context.roots.device)
        self._proposed = start, draft.lengths.tolist()
        return replace(draft, notes={**draft.notes, "budget": str(budget)})

    def observe(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        self.inner.observe(window, features, verdict)
        if self._proposed is None:
            return
        (start, drafted), self._proposed = self._proposed, None
        kept = zip(verdict.path.tolist(), verdict.num_kept.tolist(), strict=True)
        accepted = [path[1:count] for path, count in kept]
        self.controller.learn(Outcome(drafted, accepted, self._clock() - start))

    def end(self) -> None:
        self._proposed = None
        self.inner.end()
