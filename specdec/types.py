"""The nouns of one step: a draft becomes a window, the window gets a verdict.

Axes: `b` rows (sequences that still generate), `n` drafted nodes, `w = n + 1` window nodes,
`k` kept nodes at most, `v` vocabulary, `h` KV heads, `d` features, `dk`/`dv` head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.errors import ConfigError

MAX_WINDOW = 64
"""Most nodes of a drafted window: the ancestors of a node fit one 64-bit integer."""


@dataclass(frozen=True)
class Draft:
    """Tokens proposed after the root of each row; a chain is the tree whose node `i` hangs on node `i - 1`.

    Columns past `lengths[row]` are padding: token 0, parent 0.  Siblings bear distinct tokens.
    """

    tokens: Int[Tensor, "b n"]
    parents: Int[Tensor, "b n"]
    """Window index of the parent: 0 is the root, `i + 1` is drafted column `i`; always smaller than the node's own."""
    lengths: Int[Tensor, " b"]
    probs: Float[Tensor, "b n v"] | None = None
    """The distribution that each token was *sampled* from; None for drafts that are a function of the past."""
    notes: dict[str, str] = field(default_factory=dict)
    """What the step's record should say about how the draft came about: a budget, a fallback and its reason."""

    @staticmethod
    def empty(num_rows: int, device: torch.device | str = "cpu") -> Draft:
        """A draft of no tokens: the step becomes plain decoding."""
        none = torch.zeros(num_rows, 0, dtype=torch.long, device=device)
        return Draft(none, none, torch.zeros(num_rows, dtype=torch.long, device=device))

    @staticmethod
    def chains(rows: list[list[int]], device: torch.device | str = "cpu") -> Draft:
        """One chain of token ids per row, of any lengths."""
        return Draft.trees([[(token, i) for i, token in enumerate(row)] for row in rows], device)

    @staticmethod
    def trees(rows: list[list[tuple[int, int]]], device: torch.device | str = "cpu") -> Draft:
        """One list of `(token, parent window index)` nodes per row, parents before children."""
        width = max((len(row) for row in rows), default=0)
        padded = [row + [(0, 0)] * (width - len(row)) for row in rows]
        both = torch.tensor(padded, dtype=torch.long).reshape(len(rows), width, 2).to(device)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long, device=device)
        return Draft(both[..., 0].contiguous(), both[..., 1].contiguous(), lengths)

    def validate(self, vocab_size: int) -> None:
        """Raise `ConfigError` where the draft breaks its contract; reads the tensors on the host."""
        rows = zip(self.tokens.tolist(), self.parents.tolist(), self.lengths.tolist(), strict=True)
        for row, (tokens, parents, length) in enumerate(rows):
            if not 0 <= length <= len(tokens) <= MAX_WINDOW - 1:
                raise ConfigError(
                    f"draft row {row}: {length} of {len(tokens)} nodes; accepted: at most {MAX_WINDOW - 1}"
                )
            seen: set[tuple[int, int]] = set()
            for i in range(length):
                if not 0 <= parents[i] <= i:
                    raise ConfigError(f"draft row {row} node {i}: parent {parents[i]}; accepted: 0 to {i}")
                if not 0 <= tokens[i] < vocab_size:
                    raise ConfigError(f"draft row {row} node {i}: token {tokens[i]}; accepted: 0 to {vocab_size - 1}")
                if (parents[i], tokens[i]) in seen:
                    raise ConfigError(f"draft row {row} node {i}: token {tokens[i]} stands twice under {parents[i]}")
                seen.add((parents[i], tokens[i]))


@dataclass(frozen=True)
class Window:
    """The nodes that one target forward verifies: node 0 is the root, node `i + 1` is drafted column `i`.

    A prefill is a window too: the prompt but its last token, as a chain that is kept whole.
    """

    rows: tuple[int, ...]
    """Cache row of each window row (host)."""
    tokens: Int[Tensor, "b w"]
    parents: Int[Tensor, "b w"]
    """Window index of the parent; the root's is 0."""
    depths: Int[Tensor, "b w"]
    num_nodes: Int[Tensor, " b"]
    """Nodes that exist; the columns behind them are padding that nobody may look at."""
    context_lengths: tuple[int, ...]
    """Committed length `L` of each row (tokens, host)."""
    is_chain: bool
    """Host-side promise that every row is a chain: `parents[i] = i - 1`."""
    draft_probs: Float[Tensor, "b n v"] | None = None
    """The draft's `probs`: what each drafted token was sampled from."""
    masks: dict[object, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Attention masks that layers alike share, kept by whoever builds them for as long as the window lives."""

    @staticmethod
    def over(roots: Int[Tensor, " b"], draft: Draft, rows: tuple[int, ...], context_lengths: tuple[int, ...]) -> Window:
        """Put a draft under its roots."""
        tokens = torch.cat([roots[:, None], draft.tokens], dim=1)
        parents = torch.cat([torch.zeros_like(roots)[:, None], draft.parents], dim=1)
        width = tokens.shape[1]
        steps = torch.arange(width, device=tokens.device)
        behind = steps > draft.lengths[:, None]
        is_chain = bool(((parents == (steps - 1).clamp(min=0)) | behind).all())
        depths = steps.expand_as(parents) if is_chain else depths_of(parents)
        return Window(rows, tokens, parents, depths, draft.lengths + 1, context_lengths, is_chain, draft.probs)

    @staticmethod
    def chain(tokens: list[list[int]], rows: tuple[int, ...], context_lengths: tuple[int, ...], device) -> Window:
        """A window of one chain per row, roots included; used for prefill and by assistant models."""
        width = max(len(row) for row in tokens)
        padded = torch.tensor([row + [0] * (width - len(row)) for row in tokens], dtype=torch.long, device=device)
        steps = torch.arange(width, device=device).expand(len(tokens), width)
        lengths = torch.tensor([len(row) for row in tokens], dtype=torch.long, device=device)
        return Window(rows, padded, (steps - 1).clamp(min=0), steps, lengths, context_lengths, is_chain=True)

    @property
    def width(self) -> int:
        """Columns `w`, padding included."""
        return self.tokens.shape[1]

    @cached_property
    def lengths(self) -> Int[Tensor, " b"]:
        """Committed length `L` of each row, on the window's device."""
        return torch.tensor(self.context_lengths, dtype=torch.long, device=self.tokens.device)

    @cached_property
    def positions(self) -> Int[Tensor, "b w"]:
        """Position of each node: `L + depth`; padding stands at `L`, so that no position exceeds the real ones."""
        exists = torch.arange(self.width, device=self.tokens.device) < self.num_nodes[:, None]
        return self.lengths[:, None] + self.depths * exists

    @cached_property
    def deepest(self) -> list[int]:
        """Depth of each row's deepest node; synchronises on its first use."""
        if self.is_chain:
            return [count - 1 for count in self.num_nodes.tolist()]
        exists = torch.arange(self.width, device=self.tokens.device) < self.num_nodes[:, None]
        return (self.depths * exists).amax(1).tolist()

    @cached_property
    def ancestors(self) -> Bool[Tensor, "b w w"]:
        """`ancestors[row, i, j]`: node `i` attends to node `j`, that is `j` lies on the path from the root to `i`."""
        if self.is_chain:
            causal = torch.ones(self.width, self.width, dtype=torch.bool, device=self.tokens.device).tril()
            return causal.expand(len(self.rows), -1, -1)
        return ancestors_of(self.parents)

    @cached_property
    def not_ancestors(self) -> Bool[Tensor, "b w w"]:
        """The complement of `ancestors`: what a node must not see of the window."""
        return ~self.ancestors

    @cached_property
    def ancestor_bits(self) -> Int[Tensor, "b w"]:
        """The ancestor mask packed as one int64 per node (bit `j` = node `j`); for windows of at most 64 nodes."""
        if self.width > MAX_WINDOW:
            raise ConfigError(f"window of {self.width} nodes; accepted for packed masks: at most {MAX_WINDOW}")
        bits = torch.ones((), dtype=torch.long, device=self.tokens.device) << torch.arange(
            self.width, device=self.tokens.device
        )
        return (self.ancestors * bits).sum(-1)


def depths_of(parents: Int[Tensor, "b w"]) -> Int[Tensor, "b w"]:
    """Depth of each node, the root's being 0."""
    depths = torch.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        depths[:, node] = depths.gather(1, parents[:, node : node + 1]).squeeze(1) + 1
    return depths


def ancestors_of(parents: Int[Tensor, "b w"]) -> Bool[Tensor, "b w w"]:
    """Ancestor mask of each node, itself included."""
    rows, width = parents.shape
    mask = torch.eye(width, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    for node in range(1, width):
        inherited = mask.gather(1, parents[:, node, None, None].expand(-1, 1, width)).squeeze(1)
        mask[:, node] |= inherited
    return mask


@dataclass(frozen=True)
class Verdict:
    """Which nodes of a window are kept, and the token that follows the last kept node."""

    path: Int[Tensor, "b k"]
    """Kept window nodes from the root downwards, padded with -1 behind `num_kept`."""
    num_kept: Int[Tensor, " b"]
    """Kept nodes = accepted drafts + 1 = tokens emitted by the step."""
    next_tokens: Int[Tensor, " b"]
    stopped: Bool[Tensor, " b"]
    """Rows whose last emitted token ended the generation."""
    notes: dict[str, str] = field(default_factory=dict)
    """What the step's record should say about how the verdict came about: a fallback and its reason."""

    @staticmethod
    def keep_all(window: Window, next_tokens: Int[Tensor, " b"]) -> Verdict:
        """The verdict of a prefill: every node of a chain is kept."""
        if not window.is_chain:
            raise ConfigError("Verdict.keep_all: the window is a tree; accepted: chains")
        steps = torch.arange(window.width, device=window.tokens.device).expand(len(window.rows), -1)
        path = steps.masked_fill(steps >= window.num_nodes[:, None], -1)
        return Verdict(path, window.num_nodes, next_tokens, torch.zeros_like(next_tokens, dtype=torch.bool))

    def emitted(self, window: Window) -> list[list[int]]:
        """Tokens that each row emits in this step, in order; reads the tensors on the host."""
        kept = window.tokens.gather(1, self.path.clamp(min=0)).tolist()
        rows = zip(kept, self.num_kept.tolist(), self.next_tokens.tolist(), strict=True)
        return [[*tokens[1:count], following] for tokens, count, following in rows]


@dataclass(frozen=True)
class PrefixLayout:
    """Where the committed prefix of each window row lies; shared by all layers of a window."""

    page_table: Int[Tensor, "b pages"]
    lengths: Int[Tensor, " b"]
    host_lengths: tuple[int, ...]
    spans: tuple[int, ...] | None
    """First slot of each row where *every* row's pages lie one behind the other; None otherwise."""


@dataclass(frozen=True)
class KVView:
    """What attention reads for one layer: the committed prefix from the pages, the window from what was staged."""

    k_pages: Tensor
    """Pages of one layer, `[num_pages page_size h dk]`, in the storage dtype."""
    v_pages: Tensor
    k: Float[Tensor, "b w h dk"]
    v: Float[Tensor, "b w h dv"]
    prefix: PrefixLayout
    k_scales: Tensor | None = None
    """Where the pages are quantised: scales per token and head, `[num_pages page_size h]`, or `[1]` for the layer."""
    v_scales: Tensor | None = None


def decode_rows(codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Float[Tensor, "*n h d"]:
    """Rows as attention reads them, from stored rows and their scales (per token and head, or one for all)."""
    if scales is None:
        return codes.to(dtype)
    return (codes.float() * scales.float()[..., None]).to(dtype)


def select_scales(scales: Tensor | None, slots: object) -> Tensor | None:
    """Scales of some slots, from pages of scales; a layer's only scale goes for all of them."""
    return scales if scales is None or scales.dim() == 1 else scales.flatten(0, 1)[slots]  # type: ignore[index]


@dataclass(frozen=True)
class CommitStats:
    """What one window really did to the pages; counted after the write."""

    rows_staged: int
    """Window nodes staged (tokens, not tokens × layers)."""
    rows_committed: int
    bytes_written: int
    """Bytes of K/V written to pages, all layers, every write counted (moves and page copies too)."""
    commit_path: str = ""
    """Which way the rows went: `prefix`, `gather`, `direct`, ..."""

    @property
    def rows_rejected(self) -> int:
        """Staged rows that were not kept (tokens)."""
        return self.rows_staged - self.rows_committed


@dataclass(frozen=True)
class StepRecord:
    """One step as it happened, on the host."""

    index: int
    rows: tuple[int, ...]
    roots: list[int]
    draft_tokens: list[list[int]]
    draft_parents: list[list[int]]
    accepted_nodes: list[list[int]]
    """Window indices of the accepted drafts of each row, from the root downwards."""
    emitted: list[list[int]]
    stopped: list[bool]
    commit: CommitStats
    timings_ms: dict[str, float]
    """Wall time of `draft`, `target`, `verify`, `observe`, `commit` (ms)."""
    notes: dict[str, str] = field(default_factory=dict)
    """Anything a part wants known: a fallback and its reason, a chosen budget, ..."""

    @property
    def num_drafted(self) -> int:
        """Drafted tokens over all rows."""
        return sum(map(len, self.draft_tokens))

    @property
    def num_accepted(self) -> int:
        """Accepted drafts over all rows."""
        return sum(map(len, self.accepted_nodes))
