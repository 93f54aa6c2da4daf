"""Lossless speculative decoding for Hugging Face causal language models."""

from specdec.config import SpecConfig
from specdec.decoder import SpeculativeDecoder
from specdec.draft.adaptive import AdaptiveDrafter
from specdec.draft.base import DraftContext, Drafter
from specdec.errors import SpecdecError
from specdec.hf.generate import custom_generate, generate
from specdec.hf.target import HFTarget
from specdec.kv.deferred import DeferredWriter
from specdec.kv.direct import DirectWriter
from specdec.kv.pages import PagedKVCache
from specdec.kv.prefix import PrefixCache
from specdec.kv.writer import KVWriter
from specdec.sampling import Sampler
from specdec.target import Target
from specdec.types import Draft, StepRecord, Verdict, Window
from specdec.verify.adaptive import AdaptiveVerifier
from specdec.verify.base import Verifier
from specdec.verify.eager import EagerVerifier
from specdec.verify.graph import GraphVerifier
from specdec.verify.rejection import RejectionVerifier
from specdec.verify.vectorized import VectorizedVerifier

__version__ = "0.1.0"

__all__ = [
    "AdaptiveDrafter",
    "AdaptiveVerifier",
    "DeferredWriter",
    "DirectWriter",
    "Draft",
    "DraftContext",
    "Drafter",
    "EagerVerifier",
    "GraphVerifier",
    "HFTarget",
    "KVWriter",
    "PagedKVCache",
    "PrefixCache",
    "RejectionVerifier",
    "Sampler",
    "SpecConfig",
    "SpecdecError",
    "SpeculativeDecoder",
    "StepRecord",
    "Target",
    "VectorizedVerifier",
    "Verdict",
    "Verifier",
    "Window",
    "custom_generate",
    "generate",
]
