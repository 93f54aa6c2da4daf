"""The micro-benchmark of writers and verifiers: every combination decodes the same batches, in turn, in one process.

It measures the system rather than a drafter: batches of requests, latency, rows and bytes written, pages held.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.bench.measure import positions
from specdec.bench.workload import SENTENCES
from specdec.config import SpecConfig, require_int, require_number
from specdec.draft.adaptive import AdaptiveDrafter
from specdec.draft.base import Drafter
from specdec.draft.budget import CostModelController
from specdec.draft.scripted import SyntheticDrafter
from specdec.errors import ConfigError, choose
from specdec.hf.drafters import make_drafter
from specdec.hf.generate import generate
from specdec.kv.pages import PagedKVCache
from specdec.kv.writer import KVWriter
from specdec.policies import VERIFIERS, WRITERS, MakeWriter
from specdec.profiling import profiling_range
from specdec.types import MAX_WINDOW, StepRecord
from specdec.verify.base import Verifier

SCENARIOS = {"short": (32,), "medium": (256,), "long": (1024,), "mixed": (32, 256, 1024)}
"""Prompt tokens; the requests of a mixed batch take turns."""

PROFILERS = ("nvtx", "torch")


@dataclass(frozen=True)
class MicrobenchConfig:
    """What to run; unknown names and invalid values raise `ConfigError`."""

    scenario: str = "short"
    requests: int = 8
    """Rows of a batch."""
    draft_tokens: int = 4
    """Most drafted nodes of a row in one step."""
    batches: int = 5
    """Batches that every cell decodes; the latency figures are over them."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    max_new_tokens: int = 32
    prompt_count: int = 16
    """Different prompts, dealt out to the batches in turn."""
    prompt_seed: int = 0
    writers: tuple[str, ...] = ("off", "immediate", "deferred")
    verifiers: tuple[str, ...] = ("off", "vectorized", "graph", "adaptive")
    drafter: str = "suffix"
    synthetic_acceptance: float | None = None
    """Replace the drafter by one that is right with this probability; reports call it synthetic."""
    siblings: int = 0
    """Wrong siblings of each synthetic draft: windows become trees."""
    warmup: int = 1
    """Batches that every cell decodes before anything is measured."""
    profile: str | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        choose("scenario", self.scenario, SCENARIOS)
        for name in ("requests", "batches", "max_new_tokens", "prompt_count"):
            require_int(name, getattr(self, name), 1, None)
        require_int("draft_tokens", self.draft_tokens, 1, MAX_WINDOW - 1)
        require_int("siblings", self.siblings, 0, None)
        require_int("prompt_seed", self.prompt_seed, 0, 2**31)
        require_int("warmup", self.warmup, 0, None)
        require_number("temperature", self.temperature, 0.0, 100.0)
        require_number("top_p", self.top_p, 0.0, 1.0)
        if self.synthetic_acceptance is not None:
            require_number("synthetic_acceptance", self.synthetic_acceptance, 0.0, 1.0)
        for names, known, option in ((self.writers, WRITERS, "writers"), (self.verifiers, VERIFIERS, "verifiers")):
            for name in names or ("",):
                choose(option, name, dict.fromkeys(known))
            if len(set(names)) < len(names):
                raise ConfigError(f"{option}={','.join(names)}; accepted: every name once")
        if self.profile not in (None, *PROFILERS):
            raise ConfigError(f"profile={self.profile!r}; accepted: {', '.join(PROFILERS)}")
        SpecConfig(kv_dtype=self.kv_dtype)

    @property
    def picking(self) -> dict[str, Any]:
        """The arguments of `generate` that say how tokens are picked."""
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@dataclass(frozen=True)
class BatchRun:
    """One batch decoded by one cell."""

    seconds: float
    tokens: list[list[int]]
    records: list[StepRecord]
    bytes_per_token: int
    reserved_bytes: int
    """Most bytes of pages held at once."""
    used_bytes: int
    """Bytes of the tokens committed when the run ended."""
    device_peak_bytes: int | None
    """Most bytes that the GPU's allocator gave out; None on a CPU."""


@dataclass
class Cell:
    """One writer with one verifier, and what they did."""

    writer: str
    verifier: str
    runs: list[BatchRun] = field(default_factory=list)

    @property
    def name(self) -> str:
        """How reports call it."""
        return f"{self.writer}/{self.verifier}"


OnRun = Callable[[str], None]
"""Called with a cell's name after each of its runs."""


def microbench(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    config: MicrobenchConfig,
    on_run: OnRun = lambda name: None,
) -> list[Cell]:
    """Run the grid; batch by batch all cells take their turn, every other batch backwards.

    Args:
        tokenizer: None makes prompts of random token ids, for models that say nothing anyway.
    """
    batches = make_batches(model, tokenizer, config)
    cells = [Cell(writer, verifier) for writer in config.writers for verifier in config.verifiers]
    parts = {cell.name: (VERIFIERS[cell.verifier](), _drafter_maker(model, config, cell)) for cell in cells}
    truths = [_truth(model, batch, config) if config.synthetic_acceptance is not None else [] for batch in batches]
    for number in range(config.warmup + config.batches):
        index = number % len(batches)
        is_measured = number >= config.warmup
        for cell in cells if number % 2 == 0 else reversed(cells):
            verifier, make = parts[cell.name]
            run = decode(model, batches[index], make(truths[index]), WRITERS[cell.writer], verifier, config, cell.name)
            if is_measured:
                cell.runs.append(run)
            on_run(cell.name)
    return cells


def decode(
    model: PreTrainedModel,
    batch: dict[str, Any],
    drafter: Drafter,
    make_writer: MakeWriter,
    verifier: Verifier,
    config: MicrobenchConfig,
    name: str,
) -> BatchRun:
    """Decode one batch, with the clock around the whole call."""
    caches: list[PagedKVCache] = []
    records: list[StepRecord] = []
    committed = [0]

    def writer(cache: PagedKVCache) -> KVWriter:
        caches.append(cache)
        return make_writer(cache)

    def keep(record: StepRecord) -> None:
        records.append(record)
        committed[0] = sum(map(caches[0].length, range(caches[0].num_rows)))

    device = model.device
    torch.manual_seed(config.prompt_seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    with profiling_range(f"specdec.microbench {name}", device):
        start = time.perf_counter()
        sequences = generate(
            model,
            **batch,
            drafter=drafter,
            writer=writer,
            verifier=verifier,
            spec_config=SpecConfig(max_drafts=config.draft_tokens, kv_dtype=config.kv_dtype),
            on_step=keep,
            max_new_tokens=config.max_new_tokens,
            pad_token_id=0,
            **config.picking,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    assert isinstance(sequences, Tensor)
    [cache] = caches
    per_token = cache.bytes_per_token
    return BatchRun(
        seconds=seconds,
        tokens=sequences[:, batch["input_ids"].shape[1] :].tolist(),
        records=records,
        bytes_per_token=per_token,
        reserved_bytes=cache.allocator.peak_held * cache.page_size * per_token,
        used_bytes=committed[0] * per_token,
        device_peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def make_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: MicrobenchConfig
) -> list[dict[str, Tensor]]:
    """Batches of prompts, padded on the left; raises `ConfigError` where the model has no room for them."""
    lengths = SCENARIOS[config.scenario]
    room = positions(model) - config.max_new_tokens
    if max(lengths) > room:
        raise ConfigError(
            f"scenario={config.scenario!r} has prompts of {max(lengths)} tokens; accepted: at most {int(room)}, so "
            f"that {config.max_new_tokens} more fit the model's positions"
        )
    random = Random(config.prompt_seed)
    prompts = [
        _prompt(model, tokenizer, random, lengths[i % len(lengths)])
        for i in range(max(config.prompt_count, config.requests))
    ]
    num_batches = min(config.batches, -(-len(prompts) // config.requests))
    chosen = [
        [prompts[(i * config.requests + row) % len(prompts)] for row in range(config.requests)]
        for i in range(num_batches)
    ]
    return [_padded(rows, model.device) for rows in chosen]


def _prompt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, random: Random, length: int
) -> list[int]:
    if tokenizer is None:
        return [random.randrange(3, model.config.get_text_config().vocab_size) for _ in range(length)]
    text = ""
    ids: list[int] = []
    while len(ids) < length:
        text += random.choice(SENTENCES) + " "
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[:length]


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def _truth(model: PreTrainedModel, batch: dict[str, Any], config: MicrobenchConfig) -> list[list[int]]:
    """What plain decoding says, for a drafter that is told it."""
    torch.manual_seed(config.prompt_seed)
    spec = SpecConfig(kv_dtype=config.kv_dtype)
    options: dict[str, Any] = {"drafter": "none", "spec_config": spec, "pad_token_id": 0, **config.picking}
    sequences = generate(model, **batch, max_new_tokens=config.max_new_tokens, **options)
    assert isinstance(sequences, Tensor)
    return sequences[:, batch["input_ids"].shape[1] :].tolist()


def _drafter_maker(
    model: PreTrainedModel, config: MicrobenchConfig, cell: Cell
) -> Callable[[list[list[int]]], Drafter]:
    """Makes the cell's drafter of a batch, told what the target will say; the adaptive cell learns over all batches."""
    controller = CostModelController() if cell.verifier == "adaptive" else None
    fixed = make_drafter(config.drafter, model) if config.synthetic_acceptance is None else None
    vocab = model.config.get_text_config().vocab_size

    def make(truth: list[list[int]]) -> Drafter:
        drafter: Drafter
        if fixed is not None:
            drafter = fixed
        else:
            assert config.synthetic_acceptance is not None
            depth = max(1, config.draft_tokens // (config.siblings + 1))
            drafter = SyntheticDrafter(
                truth, vocab, depth, config.siblings, acceptance=config.synthetic_acceptance, seed=config.prompt_seed
            )
        return drafter if controller is None else AdaptiveDrafter(drafter, controller)

    return make


@contextlib.contextmanager
def profiled(kind: str | None, device: torch.device) -> Iterator[Any]:
    """Profile what happens inside: `nvtx` starts and stops an attached Nsight tool, `torch` yields its profiler."""
    if kind == "nvtx" and device.type == "cuda":
        torch.cuda.profiler.start()
        try:
            yield None
        finally:
            torch.cuda.profiler.stop()
    elif kind == "torch":
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            yield profiler
    else:
        yield None
