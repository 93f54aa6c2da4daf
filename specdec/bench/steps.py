"""Times recorded steps of random-weight models on a GPU; run as `python -m specdec.bench.steps OUT.json`.

For each shape: a step of w nodes over a committed context, with the model's own layers and with fused ones, against the
time that reading all weights takes; then plain generation against Hugging Face's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from specdec.bench.kernels import SHAPES, Shape, best_tilings, copy_bandwidth
from specdec.bench.provenance import provenance
from specdec.graphs.decoder import GraphConfig, GraphDecoder
from specdec.graphs.drafts import SyntheticDrafts
from specdec.graphs.fused_target import SMALL_HIDDEN_SIZE, FusedTarget
from specdec.hf.fused import fused_target
from specdec.hf.shapes import random_llama
from specdec.hf.target import HFTarget
from specdec.kv.deferred import DeferredWriter
from specdec.kv.pages import PagedKVCache
from specdec.sampling import Sampler
from specdec.target import Target
from specdec.types import Window

CONTEXT = 1024


def make_model(shape: Shape, layers: int | None = None) -> PreTrainedModel:
    """The shape with random bf16 weights, all layers or some."""
    return random_llama(
        hidden=shape.hidden,
        inner=shape.inner,
        layers=layers or shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        vocab=shape.vocab,
        tied=shape.hidden < 4096,
        device=torch.device("cuda"),
    )


def bytes_read(model: PreTrainedModel, shape: Shape, batch: int) -> int:
    """Weights and K/V that a step must read at least."""
    weights = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name or shape.hidden < 4096)
    return weights + batch * CONTEXT * shape.layers * shape.kv_heads * shape.head_size * 4


def wrong_drafts(batch: int, width: int, vocab: int) -> SyntheticDrafts | None:
    """Drafts of which practically none is accepted, so that every step costs the same; None for plain decoding."""
    if width == 1:
        return None
    drafts = torch.randint(vocab, (batch, 1024), device="cuda")
    return SyntheticDrafts(drafts, torch.zeros_like(drafts), width, vocab)


def step_figures(model: PreTrainedModel, target: Target, shape: Shape, batch: int, width: int) -> dict[str, Any]:
    """Device time of a replayed step, its kernels, and the wall time of a step as generation sees it (ms)."""
    ids = torch.randint(shape.vocab, (batch, CONTEXT), device="cuda")
    decoder = GraphDecoder(target, HFTarget(model), wrong_drafts(batch, width, shape.vocab), GraphConfig(run_ahead=4))
    sampler = Sampler(ids.cpu())
    with decoder.start(ids, sampler=sampler, max_length=CONTEXT + 1024) as run:
        for _ in range(10):
            record = decoder.step(run)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(40):
            record = decoder.step(run)
        wall = (time.perf_counter() - start) / 40 * 1e3
        if "uncaptured" in record.notes:
            return {"uncaptured": record.notes["uncaptured"], "wall_ms": wall}
        torch.cuda.synchronize()
        replay = decoder.recorder.latest()
        device = replay_time(replay)
        kernels = kernel_times(replay)
    return {
        "device_ms": device,
        "wall_ms": wall,
        "nodes": sum(count for count, _ in kernels.values()),
        "kernels_ms": sum(total for _, total in kernels.values()),
        "pool_bytes": decoder.recorder.counters.pool_bytes,
        "largest": {name: kernels[name] for name in sorted(kernels, key=lambda n: -kernels[n][1])[:14]},
    }


def replay_time(replay: Any) -> float:
    """Median of five times over ten replays each (ms)."""
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 10)
    return statistics.median(times)


def kernel_times(replay: Any) -> dict[str, tuple[int, float]]:
    """Launches and total time (ms) of each kernel of one replay."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        replay()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for event in seen.events():
        if event.device_type.name == "CUDA":
            name = event.name[:60]
            counts[name] += 1
            totals[name] += event.self_device_time_total / 1e3
    return {name: (counts[name], round(totals[name], 5)) for name in counts}


def generation_figures(model: PreTrainedModel, target: Target, shape: Shape, batch: int) -> dict[str, float]:
    """Milliseconds a token of plain generation: Hugging Face as it is, and recorded steps; prefill apart."""
    ids = torch.randint(1, shape.vocab, (batch, CONTEXT), device="cuda")

    generate: Any = model.generate

    def hf(new: int) -> float:
        return timed(lambda: generate(ids, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(ids)))

    decoder = GraphDecoder(target, HFTarget(model), None, GraphConfig(run_ahead=4))

    def own(new: int) -> float:
        return timed(lambda: list(decoder.stream(ids, sampler=Sampler(ids.cpu()), max_length=CONTEXT + new)))

    hf(2)
    own(8)
    rounds = [((hf(34) - hf(2)) / 32, (own(130) - own(2)) / 128) for _ in range(3)]
    return {
        "hf_ms": statistics.median(r[0] for r in rounds),
        "own_ms": statistics.median(r[1] for r in rounds),
        "ratio": statistics.median(r[0] / r[1] for r in rounds),
    }


def timed(run: Any) -> float:
    """Wall time (ms)."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def fused_error(model: PreTrainedModel, target: Target) -> float:
    """Relative difference of logits between fused and own layers, over one short prompt, in bf16."""
    logits: list[Tensor] = []
    for candidate in (HFTarget(model), target):
        cache = PagedKVCache(candidate.layers, 8)
        writer = DeferredWriter(cache)
        window = Window.chain([list(range(5, 25))], (cache.add_row(),), (0,), candidate.device)
        writer.begin(window)
        output = candidate.forward(window, writer)
        assert output.logits is not None
        logits.append(output.logits.float())
        writer.abort()
    return float((logits[0] - logits[1]).norm() / logits[0].norm())


def text_of(model: PreTrainedModel, target: Target, shape: Shape, width: int) -> list[list[int]]:
    """Some greedy tokens, to compare targets that should compute the same."""
    ids = torch.arange(300, device="cuda")[None] * 7919 % shape.vocab
    decoder = GraphDecoder(target, HFTarget(model), wrong_drafts(1, width, shape.vocab), GraphConfig())
    sampler = Sampler(ids.cpu())
    for _ in decoder.stream(ids, sampler=sampler, max_length=300 + 48):
        pass
    return sampler.emitted


def warm(shapes: list[Shape], widths: list[int], measured: dict[str, Any]) -> None:
    """Compile the kernels of some steps: those of one layer are those of all."""
    for shape in shapes:
        model = make_model(shape, layers=1)
        tilings = best_tilings(measured, shape.name)
        plain = fused_target(model, tilings=tilings, pdl=False, merge=shape.hidden >= SMALL_HIDDEN_SIZE)
        for width in widths:
            for target in (FusedTarget(plain.weights, tilings, pdl=True), plain):
                text_of(model, target, shape, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="file for the figures (JSON), rewritten after every figure")
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 4, 8, 32])
    parser.add_argument("--tilings", type=Path, help="figures of specdec.bench.kernels, for the fastest tilings")
    parser.add_argument("--warm", action="store_true", help="only compile what the figures need, with and without PDL")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    measured = json.loads(arguments.tilings.read_text()) if arguments.tilings else {"figures": []}
    if arguments.warm:
        warm([s for s in SHAPES if s.name in arguments.shapes], arguments.widths, measured)
        return
    bandwidth = copy_bandwidth()
    figures: list[dict[str, Any]] = []
    report = {"provenance": provenance(torch.device("cuda")), "copy_bytes_per_s": bandwidth, "figures": figures}

    def note(**figure: Any) -> None:
        figures.append(figure)
        arguments.out.write_text(json.dumps(report))
        print(json.dumps({name: value for name, value in figure.items() if name != "largest"}), flush=True)

    for shape in (s for s in SHAPES if s.name in arguments.shapes):
        model = make_model(shape)
        tilings = best_tilings(measured, shape.name)
        plain = fused_target(model, tilings=tilings, pdl=False, merge=shape.hidden >= SMALL_HIDDEN_SIZE)
        fused = FusedTarget(plain.weights, tilings, pdl=True)
        same = [text_of(model, plain, shape, w) == text_of(model, fused, shape, w) for w in (1, 32)]
        note(
            model=shape.name,
            floor_ms=bytes_read(model, shape, 1) / bandwidth * 1e3,
            fused_error=fused_error(model, plain),
            pdl_same_text=same,
        )
        for width in arguments.widths:
            note(model=shape.name, layers="fused, pdl", width=width, **step_figures(model, fused, shape, 1, width))
            if width in (1, 32):
                note(model=shape.name, layers="fused", width=width, **step_figures(model, plain, shape, 1, width))
        if shape is SHAPES[0]:
            note(model=shape.name, layers="fused, pdl", generation=generation_figures(model, fused, shape, 1))
            own = HFTarget(model, "fused")
            note(model=shape.name, layers="own", width=1, **step_figures(model, own, shape, 1, 1))
            note(model=shape.name, layers="fused, pdl", batch=8, width=1, **step_figures(model, fused, shape, 8, 1))
            note(model=shape.name, layers="fused, pdl", batch=8, generation=generation_figures(model, fused, shape, 8))
        del model, fused, plain
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
