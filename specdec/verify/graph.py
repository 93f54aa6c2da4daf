"""SCV: speculative chunk verification, captured once for each shape and replayed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.profiling import profiling_range
from specdec.sampling import Sampler
from specdec.types import MAX_WINDOW, Verdict, Window
from specdec.verify.base import Verifier
from specdec.verify.capture import CaptureBackend, CaptureCache, CaptureCounters, CudaGraphBackend, Inputs, bucket
from specdec.verify.eager import EagerVerifier
from specdec.verify.vectorized import NEEDS_PREFIX
from specdec.verify.walk import decide, noise_at_nodes, scores_at_nodes, settle

logger = logging.getLogger(__name__)

WINDOW_BUCKETS = (1, 4, 8, 16, 32, MAX_WINDOW)


@final
class GraphVerifier(Verifier):
    """`VectorizedVerifier`'s picks and walk as one graph per (batch bucket, window bucket, vocabulary, type, kind).

    Lengths are tensors and never part of the key, which is made without reading the device.  Where nothing can be
    captured the same functions run as they are; `counters` says how often, and why.  Processors that look at scores run
    before the graph; those that need the text take the eager walk.
    """

    def __init__(
        self, backend: CaptureBackend | None = None, capacity: int = 32, max_input_bytes: int = 64 << 20
    ) -> None:
        """Args:
        backend: None takes CUDA graphs.
        capacity, max_input_bytes: see `CaptureCache`.
        """
        self.delegations: Counter[str] = Counter()
        self._captures = CaptureCache(backend or CudaGraphBackend(), capacity, max_input_bytes)
        self._eager = EagerVerifier()

    @property
    def counters(self) -> CaptureCounters:
        """Hits, misses, captures, evictions, and failures by reason."""
        return self._captures.counters

    def verify(self, logits: Float[Tensor, "b w v"], window: Window, sampler: Sampler) -> Verdict:
        with profiling_range("specdec.verify", logits.device):
            if not sampler.scores_only:
                if not self.delegations[NEEDS_PREFIX]:
                    logger.info("verification goes node by node: %s", NEEDS_PREFIX)
                self.delegations[NEEDS_PREFIX] += 1
                return replace(self._eager.verify(logits, window, sampler), notes={"delegated": NEEDS_PREFIX})
            scores, noise = scores_at_nodes(logits, sampler), noise_at_nodes(window, sampler)
            with profiling_range("specdec.verify.decide", logits.device):
                decision = self._decide(scores, noise, window)
            verdict = settle(decision, window, sampler, logits, scores)
            reason = self._captures.why_uncaptured
            return verdict if reason is None else replace(verdict, notes={"uncaptured": reason})

    def _decide(
        self, scores: Float[Tensor, "b w v"], noise: Float[Tensor, "b w v"] | None, window: Window
    ) -> Int[Tensor, "b 2*w+1"]:
        rows, width, vocabulary = scores.shape
        rows_in, width_in = bucket(rows), next((size for size in WINDOW_BUCKETS if size >= width), width)
        is_chain = window.is_chain
        key: Hashable = (rows_in, width_in, vocabulary, scores.dtype, scores.device, noise is not None, is_chain)
        nodes, logits = (rows_in, width_in), (rows_in, width_in, vocabulary)

        def function(inputs: Inputs) -> Tensor:
            scores, noise, tokens, parents, num_nodes = inputs
            assert scores is not None and tokens is not None and parents is not None and num_nodes is not None
            return decide(scores, noise, tokens, parents, num_nodes, is_chain)

        inputs = (scores, noise, window.tokens, window.parents, window.num_nodes)
        decision = self._captures.run(key, function, inputs, (logits, logits, nodes, nodes, (rows_in,)))
        found = (decision.shape[1] - 1) // 2
        # A copy without the padding: the next replay writes over the decision.
        return torch.cat([decision[:rows, : width + 1], decision[:rows, found + 1 : found + 1 + width]], dim=1)
