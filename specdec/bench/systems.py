"""The ways of decoding that are compared, behind one interface."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specdec.draft.base import Drafter
from specdec.hf.generate import generate
from specdec.types import StepRecord

HF = "hf"
"""Name of the reference: `model.generate` as it comes."""
PLAIN = "none"
"""Name of our own plain decoding: the loop without a drafter."""


@dataclass(frozen=True)
class Trace:
    """One generation, with the times at which tokens came."""

    tokens: list[int]
    seconds: float
    """The whole call, prefill included."""
    arrivals: list[tuple[float, int]]
    """`(seconds since the call, tokens)` of every emission."""
    records: list[StepRecord] = field(default_factory=list)
    """The steps, for systems that have them."""

    @property
    def decode_seconds(self) -> float:
        """From the first emission to the last: prefill, and the step that gave the first tokens, are left out."""
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def decode_tokens(self) -> int:
        """Tokens that came in `decode_seconds`: all but those of the first emission."""
        return len(self.tokens) - self.arrivals[0][1]


class System(ABC):
    """One way of decoding."""

    @property
    @abstractmethod
    def name(self) -> str:
        """How reports call it."""

    @abstractmethod
    def decode(self, prompt: Int[Tensor, "1 t"], seed: int, arguments: dict[str, Any]) -> Trace:
        """Decode one prompt, with the arguments of `model.generate`; sets the global seed first."""


@final
class HFSystem(System):
    """`model.generate`, plain or with its own ways of speculation."""

    def __init__(self, model: PreTrainedModel, name: str = HF, **extras: Any) -> None:
        """`extras` are further arguments of `model.generate`: `prompt_lookup_num_tokens`, `assistant_model`, ..."""
        self._model = model
        self._name = name
        self._extras = extras

    @property
    def name(self) -> str:
        return self._name

    def decode(self, prompt: Int[Tensor, "1 t"], seed: int, arguments: dict[str, Any]) -> Trace:
        watch = StreamWatch()
        mask = torch.ones_like(prompt)
        generate_plainly: Any = self._model.generate
        start = start_clock(prompt.device, seed)
        sequences = generate_plainly(prompt, attention_mask=mask, streamer=watch, **arguments, **self._extras)
        seconds = stop_clock(prompt.device) - start
        tokens = sequences[0, prompt.shape[1] :].tolist()
        return Trace(tokens, seconds, [(moment - start, count) for moment, count in watch.arrivals])


@final
class SpecdecSystem(System):
    """`specdec.generate` with one drafter."""

    def __init__(
        self, model: PreTrainedModel, drafter: Drafter, name: str, writer: str = "deferred", verifier: str = "eager"
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._name = name
        self._choices: dict[str, Any] = {"writer": writer, "verifier": verifier}

    @property
    def name(self) -> str:
        return self._name

    def decode(self, prompt: Int[Tensor, "1 t"], seed: int, arguments: dict[str, Any]) -> Trace:
        records: list[StepRecord] = []
        moments: list[float] = []

        def keep(record: StepRecord) -> None:
            moments.append(time.perf_counter())
            records.append(record)

        extras: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "drafter": self._drafter, **self._choices}
        start = start_clock(prompt.device, seed)
        sequences = generate(self._model, prompt, on_step=keep, **extras, **arguments)
        seconds = stop_clock(prompt.device) - start
        assert isinstance(sequences, Tensor)
        tokens = sequences[0, prompt.shape[1] :].tolist()
        counts = [len(record.emitted[0]) for record in records]
        return Trace(tokens, seconds, [(m - start, n) for m, n in zip(moments, counts, strict=True)], records)


@final
class StreamWatch(BaseStreamer):
    """Notes when tokens come from `model.generate`; the prompt, which is put first, does not count."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self._saw_prompt = False

    def put(self, value: Tensor) -> None:
        """Called by transformers with the prompt, and then with new tokens."""
        if self._saw_prompt:
            self.arrivals.append((time.perf_counter(), value.numel()))
        self._saw_prompt = True

    def end(self) -> None:
        """Called by transformers behind the last token."""


def start_clock(device: torch.device, seed: int) -> float:
    """Seed, wait for the device, and tell the time (s)."""
    torch.manual_seed(seed)
    return stop_clock(device)


def stop_clock(device: torch.device) -> float:
    """Wait for the device and tell the time (s)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
