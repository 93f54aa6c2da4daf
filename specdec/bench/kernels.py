"""Times kernels on a GPU beside what they replace; run as `python -m specdec.bench.kernels OUT.json`.

They are timed inside CUDA graphs, over several sets of inputs in turn, so that neither launches nor a warm cache count.
With `--warm I N` every N-th case runs once, to compile: several such processes fill Triton's cache in parallel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from specdec.bench.provenance import provenance
from specdec.kernels.acceptance import pick_tiles, walk
from specdec.kernels.commit import CommitTable, commit_rows
from specdec.kernels.skinny_linear import (
    Blocks,
    Rotation,
    add_product,
    gate,
    normed_product,
    project_heads,
    stream_naive,
    tile_rows,
)
from specdec.kernels.step_state import StepBuffers, open_window, settle_step
from specdec.kernels.tiling import Tiling
from specdec.kernels.tree_attention import tree_attention

Call = Callable[[], object]

PRODUCTS = ("qkv", "output", "gate", "down", "lm_head")

COPIES = 4
"""Sets of inputs that take turns."""


@dataclass(frozen=True)
class Shape:
    """What matters of a model."""

    name: str
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    inner: int
    vocab: int
    layers: int


SHAPES = (
    Shape("SmolLM2-135M", 9, 3, 64, 576, 1536, 49152, 30),
    Shape("Llama-3.2-3B", 24, 8, 128, 3072, 8192, 128256, 28),
    Shape("Llama-3.1-8B", 32, 8, 128, 4096, 14336, 128256, 32),
)


@dataclass(frozen=True)
class Case:
    """One figure: its calls take turns in one graph."""

    labels: dict[str, Any]
    make: Callable[[], Sequence[Call]]


def randn(*shape: int) -> Tensor:
    """bf16 noise on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def attention_cases() -> Iterator[Case]:
    """Tree attention against SDPA over contiguous K/V (heads repeated beforehand where a mask needs it)."""
    sizes = ((1, 1, 1024), (1, 8, 1024), (1, 32, 1024), (1, 64, 1024), (1, 1, 8192), (1, 32, 8192), (8, 8, 1024))
    for shape in SHAPES:
        for batch, width, context in sizes:
            labels = dict(kernel="attention", model=shape.name, batch=batch, width=width, context=context)
            yield Case(labels | {"by": "tree"}, partial(tree_calls, shape, batch, width, context))
            yield Case(labels | {"by": "sdpa"}, partial(sdpa_calls, shape, batch, width, context))
    for shape in (SHAPES[0], SHAPES[2]):
        for width in (1, 32):
            labels = dict(kernel="attention", model=shape.name, batch=1, width=width, context=1024)
            for tiling in tilings(shape, width):
                calls = partial(tree_calls, shape, 1, width, 1024, tiling)
                yield Case(labels | {"by": "tree", "tiling": astuple(tiling)}, calls)


def tilings(shape: Shape, width: int) -> Iterator[Tiling]:
    """Other ways to cut the work of one row."""
    rows = shape.heads // shape.kv_heads * width
    block_m = min(64, max(16, 1 << (rows - 1).bit_length()))
    for block_n, splits, warps in ((64, 15, 4), (64, 31, 4), (128, 7, 4), (32, 31, 2), (64, 15, 8)):
        yield Tiling(block_m, block_n, splits, warps, 2)
    if rows > 64:
        yield Tiling(128, 64, 15, 8, 2)
        yield Tiling(32, 64, 15, 4, 2)


def tree_calls(shape: Shape, batch: int, width: int, context: int, tiling: Tiling | None = None) -> list[Call]:
    page_size, kv, d = 16, shape.kv_heads, shape.head_size
    pages = context // page_size + 1
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    bits = torch.tensor([(2 << i) - 1 - (1 << 64 if i == 63 else 0) for i in range(width)], device="cuda")
    bits = bits.repeat(batch, 1)
    positions = (context + torch.arange(width, device="cuda")).repeat(batch, 1)

    def one() -> Call:
        k_pages, v_pages = randn(batch * pages, page_size, kv, d), randn(batch * pages, page_size, kv, d)
        query = randn(batch, width, shape.heads, d).transpose(1, 2)
        k, v = randn(batch, width, kv, d), randn(batch, width, kv, d)
        mask = None if width == 1 else bits
        fixed = (query, k_pages, v_pages, k, v, table, lengths, positions, mask, d**-0.5)
        return lambda: tree_attention(*fixed, tiling=tiling)

    return [one() for _ in range(COPIES)]


def sdpa_calls(shape: Shape, batch: int, width: int, context: int) -> list[Call]:
    d, total = shape.head_size, context + width
    mask = torch.ones(width, total, dtype=torch.bool, device="cuda").tril(context)
    kv = shape.kv_heads if width == 1 else shape.heads

    def one() -> Call:
        q, k, v = randn(batch, shape.heads, width, d), randn(batch, kv, total, d), randn(batch, kv, total, d)
        if width == 1:
            return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return [one() for _ in range(COPIES)]


def product_cases(pdl: bool) -> Iterator[Case]:
    """The products of a decoder layer, fused, in several tilings, against the matrix library's plain product."""
    for shape in SHAPES:
        for rows in (1, 8, 32) if shape is SHAPES[0] else (1, 32):
            for name in PRODUCTS:
                labels = dict(kernel=name, model=shape.name, rows=rows)
                yield Case(labels | {"by": "library"}, partial(product_calls, shape, rows, name, library=True))
                for blocks in block_choices(shape, rows, name):
                    calls = partial(product_calls, shape, rows, name, blocks, pdl=pdl)
                    yield Case(labels | {"by": "fused", "pdl": pdl, "tiling": astuple(blocks)}, calls)


def block_choices(shape: Shape, rows: int, name: str) -> Iterator[Blocks]:
    """Ways to cut a product, the rule of thumb first."""
    size, columns = {
        "qkv": (shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_size // 2),
        "output": (shape.heads * shape.head_size, shape.hidden),
        "gate": (shape.hidden, shape.inner),
        "down": (shape.inner, shape.hidden),
        "lm_head": (shape.hidden, shape.vocab),
    }[name]
    block_m = tile_rows(rows)
    yield Blocks.choose(rows, size, columns, 2 if name in ("qkv", "gate") else 1, 2)
    choices: tuple[tuple[int, int, int, int], ...]
    if block_m == 1 and size <= 2048:
        whole = 1 << (size - 1).bit_length()
        choices = ((2, whole, 1, 4), (4, whole, 2, 4), (8, whole, 4, 4), (2, whole, 4, 4), (8, 256, 4, 3))
        if name == "lm_head":
            choices = ((16, whole, 4, 4), (16, whole, 8, 4), (4, whole, 1, 4), (16, 256, 4, 3))
    elif block_m == 1:
        choices = ((16, 512, 8, 4), (4, 1024, 4, 4), (8, 1024, 8, 3), (16, 256, 4, 5), (4, 512, 4, 6))
    elif size <= 2048:
        choices = ((16, 256, 4, 3), (16, 64, 4, 6), (32, 128, 4, 4), (16, 128, 8, 5))
        if name == "lm_head":
            choices = ((32, 64, 4, 5), (32, 128, 4, 4), (64, 64, 8, 4), (128, 64, 8, 4))
    else:
        choices = ((16, 256, 4, 4), (32, 128, 4, 4), (32, 64, 4, 6), (64, 64, 4, 4), (64, 128, 8, 3))
    for block_n, block_k, warps, stages in choices:
        yield Blocks(block_m, block_n, block_k, warps, stages)


def product_calls(
    shape: Shape, rows: int, name: str, blocks: Blocks | None = None, library: bool = False, pdl: bool = False
) -> list[Call]:
    hidden, d = shape.hidden, shape.head_size
    wide = shape.heads * d
    out, size = {
        "qkv": (wide + 2 * shape.kv_heads * d, hidden),
        "output": (hidden, wide),
        "gate": (2 * shape.inner, hidden),
        "down": (hidden, shape.inner),
        "lm_head": (shape.vocab, hidden),
    }[name]
    copies = max(2, min(30, (256 << 20) // (2 * out * size)))
    x, norm = randn(rows, size), randn(size)
    stream, residual = stream_naive(x, norm), stream_naive(randn(rows, shape.hidden), randn(shape.hidden))
    rotation = Rotation(randn(2048, d // 2), randn(2048, d // 2))
    positions = torch.arange(rows, device="cuda")

    def one() -> Call:
        weight = randn(out, size) * 0.02
        if library:
            return lambda: F.linear(x, weight)
        if name == "qkv":
            q, k, v = weight.split([wide, shape.kv_heads * d, shape.kv_heads * d])
            return lambda: project_heads(stream, 1e-5, (q, k, v), None, rotation, positions, blocks, pdl)
        if name == "gate":
            first, second = weight.chunk(2)
            return lambda: gate(stream, 1e-5, first, second, blocks, pdl)
        if name == "lm_head":
            return lambda: normed_product(stream, 1e-5, weight, blocks, pdl)
        return lambda: add_product(x, weight, residual, residual.scaled[0], blocks, pdl)

    return [one() for _ in range(copies)]


def bookkeeping_cases() -> Iterator[Case]:
    """What a step does besides the forward."""
    for shape, batch, width in ((SHAPES[0], 1, 1), (SHAPES[2], 1, 32)):
        for name in ("pick", "argmax", "walk", "commit", "open", "settle"):
            labels = dict(kernel=name, model=shape.name, batch=batch, width=width)
            yield Case(labels, partial(bookkeeping_calls, shape, batch, width, name))


def bookkeeping_calls(shape: Shape, batch: int, width: int, name: str) -> list[Call]:
    device = torch.device("cuda")
    buffers = StepBuffers.empty(batch, width, device)
    logits = randn(batch, width, shape.vocab)
    limits = torch.full((batch,), 100, device=device)
    stops = torch.tensor([2], device=device)
    tiles = pick_tiles(logits)
    args = (buffers.tokens, buffers.parents, buffers.ancestor_bits, buffers.num_nodes, limits, stops)
    found = walk(tiles, *args)
    if name == "pick":
        return [lambda: pick_tiles(logits)] * COPIES
    if name == "argmax":
        return [lambda: logits.argmax(-1)] * COPIES
    if name == "walk":
        return [lambda: walk(tiles, *args, out=found)] * COPIES
    if name == "open":
        return [lambda: open_window(buffers)] * COPIES
    if name == "settle":
        return [lambda: settle_step(buffers, found.path, found.num_kept, found.next_tokens, found.stopped)] * COPIES
    pages = [randn(batch * 8, 16, shape.kv_heads, shape.head_size) for _ in range(2 * shape.layers)]
    staged = [randn(batch, width, shape.kv_heads, shape.head_size) for _ in range(2 * shape.layers)]
    table = torch.arange(batch * 8, dtype=torch.int32, device=device).view(batch, 8)
    planes = CommitTable(len(pages), 2, 16, device)
    planes.fill(staged, pages)
    path = torch.arange(width, device=device).repeat(batch, 1)
    kept = torch.full((batch,), min(width, 4), device=device)
    held = (staged, pages)  # the table knows addresses only

    def commit() -> int:
        commit_rows(planes, table, buffers.lengths, path, kept)
        return len(held)

    return [commit] * COPIES


def all_cases(pdl: bool) -> list[Case]:
    """Every kernel figure."""
    return [*product_cases(pdl), *attention_cases(), *bookkeeping_cases()]


def best_tilings(report: dict[str, Any], model: str) -> dict[tuple[str, int], Blocks]:
    """The fastest measured tiling of each product, as `FusedTarget` takes them."""
    best: dict[tuple[str, int], tuple[float, Blocks]] = {}
    for figure in report["figures"]:
        if figure["model"] == model and figure.get("by") == "fused":
            blocks = Blocks(*figure["tiling"])
            key = (figure["kernel"], blocks.block_m)
            if key not in best or figure["us"] < best[key][0]:
                best[key] = (figure["us"], blocks)
    return {key: blocks for key, (_, blocks) in best.items()}


def median_time(calls: Sequence[Call], replays: int = 15) -> float:
    """Median over replays of the mean time of a call in a graph of all of them (µs)."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 12 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    # A kernel's copy: in a graph, `copy_` would be a memcpy node, which is slower.
    return 2 * source.nbytes / (median_time([lambda: torch.neg(source, out=target)], replays=5) * 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="file for the figures (JSON), rewritten as they come")
    parser.add_argument("--warm", nargs=2, type=int, metavar=("I", "N"), help="run every N-th case once and stop")
    parser.add_argument("--pdl", action="store_true", help="products start while the kernel in front of them ends")
    arguments = parser.parse_args()
    cases = all_cases(arguments.pdl)
    torch.manual_seed(0)
    if arguments.warm:
        first, every = arguments.warm
        for case in cases[first::every]:
            with contextlib.suppress(triton.runtime.errors.OutOfResources):
                case.make()[0]()
        torch.cuda.synchronize()
        return
    report: dict[str, Any] = {
        "provenance": provenance(torch.device("cuda")),
        "copy_bytes_per_s": copy_bandwidth(),
        "figures": [],
    }
    for number, case in enumerate(cases):
        try:
            figure: dict[str, Any] = {"us": round(median_time(case.make()), 3)}
        except triton.runtime.errors.OutOfResources as error:
            figure = {"us": float("inf"), "error": str(error)}
        report["figures"].append({**case.labels, **figure})
        if number % 40 == 39 or case is cases[-1]:
            arguments.out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
