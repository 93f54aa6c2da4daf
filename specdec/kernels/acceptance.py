"""Picks for every node of a window, and the walk down the picks: path, number of kept nodes, next token.

The law is that of `Verifier`; here every node gets its pick at once, and the walk is one mask test per node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

MOST_TILES = 64


@triton.jit
def _pick_tiles(
    scores_ptr,
    noise_ptr,
    counts_ptr,
    depths_ptr,
    best_ptr,
    place_ptr,
    vocab,
    width,
    rows,
    capacity,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """Program `(node, tile)`: the best of a tile of the vocabulary, the first of equals; NaN beats all, as token -1."""
    item = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    value = tl.load(scores_ptr + item * vocab + column, mask=inside, other=0.0).to(tl.float32)
    if SAMPLED:
        row = item // width
        index = tl.load(counts_ptr + row) + tl.load(depths_ptr + item)
        noise_at = ((index % capacity) * rows + row) * vocab + column
        value = value / tl.load(noise_ptr + noise_at, mask=inside, other=1.0)
    # The tail of the last tile must not win, not even against scores of -inf: the search for the place skips it.
    broken = tl.max(tl.where(inside & (value != value), 1, 0), 0)
    best = tl.max(tl.where(inside, value, float("-inf")), 0)
    place = tl.min(tl.where(inside & (value == best), column, 2147483647), 0)
    at = item * TILES + tile
    tl.store(best_ptr + at, tl.where(broken > 0, float("inf"), best))
    tl.store(place_ptr + at, tl.where(broken > 0, -1, place))


@triton.jit
def _walk(
    best_ptr,
    place_ptr,
    tokens_ptr,
    parents_ptr,
    bits_ptr,
    num_nodes_ptr,
    limits_ptr,
    stops_ptr,
    picks_ptr,
    path_ptr,
    num_kept_ptr,
    next_ptr,
    stopped_ptr,
    tiles,
    width,
    num_stops,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program `row`: a node is kept if it and all its ancestors bear the pick of their parents."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, WIDTH)
    tile = tl.arange(0, TILES)
    there = node < width
    at = row * width + node
    tile_at = at[:, None] * tiles + tile[None, :]
    in_tiles = there[:, None] & (tile < tiles)[None, :]
    best = tl.load(best_ptr + tile_at, mask=in_tiles, other=float("-inf"))
    place = tl.load(place_ptr + tile_at, mask=in_tiles, other=2147483647)
    top = tl.max(best, 1)
    pick = tl.min(tl.where(best == top[:, None], place, 2147483647), 1).to(tl.int64)
    tl.store(picks_ptr + at, pick, mask=there)

    token = tl.load(tokens_ptr + at, mask=there, other=0)
    parent = tl.load(parents_ptr + at, mask=there, other=0)
    bits = tl.load(bits_ptr + at, mask=there, other=0)
    num_nodes = tl.load(num_nodes_ptr + row).to(tl.int32)
    limit = tl.load(limits_ptr + row).to(tl.int32)
    of_parent = tl.sum(tl.where(parent[:, None] == node[None, :], pick[None, :], 0), 1)
    matches = (token == of_parent) & (node < num_nodes)
    for i in range(0, num_stops):
        # A pick that ends the generation ends the walk: the node that bears it is not entered.
        matches = matches & (token != tl.load(stops_ptr + i))
    matches = matches | (node == 0)
    missing = ~tl.sum(tl.where(matches, tl.full([WIDTH], 1, tl.int64) << node.to(tl.int64), 0), 0)
    kept = there & matches & ((bits & missing) == 0)
    # Parents come before children, so the order of the numbers is the order of the path.
    depth = tl.cumsum(kept.to(tl.int32), 0) - 1
    kept = kept & (depth < limit)
    num_kept = tl.sum(kept.to(tl.int32), 0)
    last = tl.max(tl.where(kept, node, 0), 0)
    following = tl.sum(tl.where(node == last, pick, 0), 0)
    stopped = num_kept == limit
    for i in range(0, num_stops):
        stopped = stopped | (following == tl.load(stops_ptr + i))
    tl.store(path_ptr + row * width + node, tl.full([WIDTH], -1, tl.int64), mask=there & (node >= num_kept))
    tl.store(path_ptr + row * width + depth, node.to(tl.int64), mask=kept)
    tl.store(num_kept_ptr + row, num_kept.to(tl.int64))
    tl.store(next_ptr + row, following)
    tl.store(stopped_ptr + row, stopped.to(tl.int8))


@dataclass(frozen=True)
class PickTiles:
    """The best score and its token in each tile of the vocabulary, for every node; `walk` finishes the search."""

    best: Float[Tensor, "n tiles"]
    tokens: Int[Tensor, "n tiles"]

    @property
    def picks(self) -> Int[Tensor, " n"]:
        """The pick of every node; -1 where its scores hold NaN."""
        return self.tokens.gather(1, self.best.argmax(1, keepdim=True)).squeeze(1).long()


@dataclass(frozen=True)
class NoiseRing:
    """Exponential variates for the generated indices `t` that are in use, kept at `t % capacity`."""

    variates: Float[Tensor, "capacity b v"]
    counts: Int[Tensor, " b"]
    """Generated index of each row's first pick (the one at the root)."""


@dataclass(frozen=True)
class Walk:
    """What became of the windows."""

    picks: Int[Tensor, "b w"]
    path: Int[Tensor, "b w"]
    """Kept nodes from the root downwards, then -1."""
    num_kept: Int[Tensor, " b"]
    next_tokens: Int[Tensor, " b"]
    """The pick of the last kept node; -1 where its scores hold NaN."""
    stopped: Int[Tensor, " b"]
    """1 where the next token is a stop, or the last one allowed."""


def pick_tiles(
    scores: Float[Tensor, "b w v"], noise: NoiseRing | None = None, depths: Int[Tensor, "b w"] | None = None
) -> PickTiles:
    """Greedy picks; with `noise`, `scores` are probabilities and the pick at depth `d` is `argmax(p / e_{t+d})`."""
    rows, width, vocab = scores.shape
    block = max(4096, triton.next_power_of_2(triton.cdiv(vocab, MOST_TILES)))
    block = min(block, max(16, triton.next_power_of_2(vocab)))
    tiles = triton.cdiv(vocab, block)
    best = torch.empty(rows * width, tiles, dtype=torch.float32, device=scores.device)
    place = torch.empty(rows * width, tiles, dtype=torch.int32, device=scores.device)
    scores = scores.contiguous()
    _pick_tiles[(rows * width, tiles)](
        scores,
        best if noise is None else noise.variates,
        place if noise is None else noise.counts,
        place if depths is None else depths.contiguous(),
        best,
        place,
        vocab,
        width,
        rows,
        1 if noise is None else noise.variates.shape[0],
        TILES=tiles,
        BLOCK=block,
        SAMPLED=noise is not None,
        num_warps=4,
    )
    return PickTiles(best, place)


def walk(
    tiles: PickTiles,
    tokens: Int[Tensor, "b w"],
    parents: Int[Tensor, "b w"],
    ancestor_bits: Int[Tensor, "b w"],
    num_nodes: Int[Tensor, " b"],
    limits: Int[Tensor, " b"],
    stop_tokens: Int[Tensor, " s"],
    out: Walk | None = None,
) -> Walk:
    """Keep the path of each row whose tokens are the picks, at most `limits[row]` nodes of it (0: a row that is done).

    One program a row; reads nothing on the host; overwrites `out` where given.
    """
    rows, width = tokens.shape
    out = out or empty_walk(rows, width, tokens.device)
    num_tiles = tiles.best.shape[1]
    _walk[(rows,)](
        tiles.best,
        tiles.tokens,
        tokens,
        parents,
        ancestor_bits,
        num_nodes,
        limits,
        stop_tokens,
        out.picks,
        out.path,
        out.num_kept,
        out.next_tokens,
        out.stopped,
        num_tiles,
        width,
        len(stop_tokens),
        TILES=triton.next_power_of_2(num_tiles),
        WIDTH=triton.next_power_of_2(width),
        num_warps=1 if width * num_tiles <= 256 else 4,
    )
    return out


def empty_walk(rows: int, width: int, device: torch.device) -> Walk:
    """Buffers for `walk`."""
    numbers = [torch.zeros(rows, dtype=torch.long, device=device) for _ in range(2)]
    grids = [torch.full((rows, width), -1, dtype=torch.long, device=device) for _ in range(2)]
    return Walk(grids[0], grids[1], numbers[0], numbers[1], torch.zeros(rows, dtype=torch.int8, device=device))


def picks_naive(
    scores: Float[Tensor, "b w v"], noise: NoiseRing | None = None, depths: Int[Tensor, "b w"] | None = None
) -> Int[Tensor, "b w"]:
    """The twin of `pick_tiles`."""
    picks = torch.full(scores.shape[:2], -1, dtype=torch.long, device=scores.device)
    for row in range(scores.shape[0]):
        for node in range(scores.shape[1]):
            values = scores[row, node].float()
            if noise is not None and depths is not None:
                index = int(noise.counts[row]) + int(depths[row, node])
                values = values / noise.variates[index % len(noise.variates), row]
            if not values.isnan().any():
                picks[row, node] = int((values == values.max()).nonzero()[0])
    return picks


def walk_naive(
    picks: Int[Tensor, "b w"],
    tokens: Int[Tensor, "b w"],
    parents: Int[Tensor, "b w"],
    num_nodes: Int[Tensor, " b"],
    limits: Int[Tensor, " b"],
    stop_tokens: Int[Tensor, " s"],
) -> Walk:
    """The twin of `walk`: from the root, descend to the child that bears the pick, or stop."""
    rows, width = tokens.shape
    out = empty_walk(rows, width, tokens.device)
    stops = set(stop_tokens.tolist())
    out.picks.copy_(picks)
    for row in range(rows):
        path, limit = [0], int(limits[row])
        while (following := int(picks[row, path[-1]])) not in stops and len(path) < limit:
            below = [
                j
                for j in range(1, int(num_nodes[row]))
                if (int(parents[row, j]), int(tokens[row, j])) == (path[-1], following)
            ]
            if not below:
                break
            path.append(below[0])
        path = path[:limit]
        out.path[row, : len(path)] = torch.tensor(path, dtype=torch.long)
        out.num_kept[row] = len(path)
        out.next_tokens[row] = following
        out.stopped[row] = int(following in stops or len(path) == limit)
    return out
