"""SCV without graphs: one pick for every node, one walk for all rows, one read on the host."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import final

from jaxtyping import Float
from torch import Tensor

from specdec.sampling import Sampler
from specdec.types import Verdict, Window
from specdec.verify.base import Verifier
from specdec.verify.eager import EagerVerifier
from specdec.verify.walk import decide, noise_at_nodes, scores_at_nodes, settle

logger = logging.getLogger(__name__)

NEEDS_PREFIX = "processors that look at the text run at visited nodes only"


@final
class VectorizedVerifier(Verifier):
    """Equal to `EagerVerifier`, in a number of operations that does not depend on rows or depths.

    Processors that need the text before a node cannot run at all nodes at once: such requests take the eager walk,
    and `delegations` counts them by reason.
    """

    def __init__(self) -> None:
        self.delegations: Counter[str] = Counter()
        self._eager = EagerVerifier()

    def verify(self, logits: Float[Tensor, "b w v"], window: Window, sampler: Sampler) -> Verdict:
        if not sampler.scores_only:
            if not self.delegations[NEEDS_PREFIX]:
                logger.info("verification goes node by node: %s", NEEDS_PREFIX)
            self.delegations[NEEDS_PREFIX] += 1
            return replace(self._eager.verify(logits, window, sampler), notes={"delegated": NEEDS_PREFIX})
        scores, noise = scores_at_nodes(logits, sampler), noise_at_nodes(window, sampler)
        decision = decide(scores, noise, window.tokens, window.parents, window.num_nodes, window.is_chain)
        return settle(decision, window, sampler, logits, scores)
