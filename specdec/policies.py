"""Writers and verifiers by name."""

from __future__ import annotations

from collections.abc import Callable

from specdec.kv.deferred import DeferredWriter
from specdec.kv.direct import DirectWriter
from specdec.kv.metrics import metered
from specdec.kv.pages import PagedKVCache
from specdec.kv.writer import KVWriter
from specdec.verify.adaptive import AdaptiveVerifier
from specdec.verify.base import Verifier
from specdec.verify.eager import EagerVerifier
from specdec.verify.graph import GraphVerifier
from specdec.verify.vectorized import VectorizedVerifier

MakeWriter = Callable[[PagedKVCache], KVWriter]

WRITERS: dict[str, MakeWriter] = {
    "deferred": DeferredWriter,
    "direct": DirectWriter,
    "off": DirectWriter,
    "immediate": metered(DirectWriter),
}
"""`off` and `direct` are the same; `immediate` writes like them and counts its windows."""

VERIFIERS: dict[str, Callable[[], Verifier]] = {
    "eager": EagerVerifier,
    "off": EagerVerifier,
    "vectorized": VectorizedVerifier,
    "graph": GraphVerifier,
    "adaptive": AdaptiveVerifier,
}
"""`off` and `eager` are the same; all of them give equal verdicts."""
