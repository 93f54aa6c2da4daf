"""Lossless speculative decoding for Hugging Face causal language models."""

from specdec.config import SpecConfig
from specdec.decoder import SpeculativeDecoder
from specdec.draft.base import DraftContext, Drafter
from specdec.errors import SpecdecError
from specdec.hf.generate import custom_generate, generate
from specdec.hf.target import HFTarget
from specdec.kv.deferred import DeferredWriter
from specdec.kv.direct import DirectWriter
from specdec.kv.pages import PagedKVCache
from specdec.kv.writer import KVWriter
from specdec.sampling import Sampler
from specdec.target import Target
from specdec.types import Draft, StepRecord, Verdict, Window
from specdec.verify.base import Verifier
from specdec.verify.eager import EagerVerifier

__version__ = "0.1.0"

__all__ = [
    "DeferredWriter",
    "DirectWriter",
    "Draft",
    "DraftContext",
    "Drafter",
    "EagerVerifier",
    "HFTarget",
    "KVWriter",
    "PagedKVCache",
    "Sampler",
    "SpecConfig",
    "SpecdecError",
    "SpeculativeDecoder",
    "StepRecord",
    "Target",
    "Verdict",
    "Verifier",
    "Window",
    "custom_generate",
    "generate",
]
