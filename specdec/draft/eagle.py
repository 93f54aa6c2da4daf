"""`EagleDrafter`: drafts with an EAGLE head, as chains or as dynamic trees.

The head's own cache holds one pair (f_t, x_{t+1}) per verified token: the target's feature of a token, and the token
behind it.  Since the head has one layer, keys and values of a pair depend on nothing but the pair; so accepted tokens
are taken up with true features as soon as a verdict is known, and only the last pair of each row runs through the
whole layer, as the first step of the next draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.config import build_config, require_int
from specdec.draft.base import DraftContext, Drafter
from specdec.draft.eagle_cache import DraftPages, DraftPrefixes, Prefix, append, attend
from specdec.draft.eagle_head import EagleHead
from specdec.draft.eagle_tree import CandidatePool, Frontier
from specdec.draft.lm_head import Int8LmHead, LmHead, best_of, narrowed, plain_lm_head
from specdec.errors import ConfigError
from specdec.target import LayerShape
from specdec.types import MAX_WINDOW, Draft, Verdict, Window

MakePages = Callable[[LayerShape, int], DraftPages]
"""`(shape of the layer, tokens to make room for) → an empty cache`."""


@dataclass(frozen=True)
class EagleDraftConfig:
    """How an `EagleDrafter` drafts; unknown names and invalid values raise `ConfigError`."""

    width: int = 8
    """Nodes run at each level and children taken of each; 1 drafts chains."""
    depth: int = 6
    """Deepest drafted node = draft steps (the first one extends the cache as well)."""
    nodes: int = 31
    """Drafted nodes of a row, the root not counted (1 to 63); for chains the depth is the limit."""
    vocabulary: int | tuple[int, ...] | None = None
    """Narrower draft vocabulary: target ids, or how many of the most frequent ones; None: all that the head has.  A
    narrow one costs acceptance and saves most of the time that a draft step takes on a CPU."""
    min_probability: float = 0.0
    """Nodes that the head thinks less probable than this, given the text so far, are not drafted (0 to 1)."""
    int8_lm_head: bool = False
    """Round `lm_head` to int8, which on a CPU is several times faster than fp32 and makes large vocabularies cheap."""
    follow_noise: bool = True
    """When the target samples, rank tokens as its noise would rank them if the head were right."""
    sliding_window: int | None = None
    """Pairs that draft attention looks back (the current one included); None: as the head says."""
    max_positions: int | None = None
    """Positions up to which to draft; None: as the head says."""

    def __post_init__(self) -> None:
        require_int("width", self.width, 1, MAX_WINDOW - 1)
        require_int("depth", self.depth, 1, MAX_WINDOW - 1)
        require_int("nodes", self.nodes, 1, MAX_WINDOW - 1)
        for name in ("sliding_window", "max_positions"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1, None)
        if isinstance(self.vocabulary, int):
            require_int("vocabulary", self.vocabulary, 1, None)
        elif self.vocabulary is not None and len(self.vocabulary) == 0:
            raise ConfigError("vocabulary=(); accepted: at least one token id")
        if not 0.0 <= self.min_probability < 1.0:
            raise ConfigError(f"min_probability={self.min_probability!r}; accepted: 0 ≤ p < 1")

    @staticmethod
    def of(**values: Any) -> EagleDraftConfig:
        """Build a configuration from keyword arguments, refusing unknown names by name."""
        return build_config(EagleDraftConfig, values)


@dataclass
class Row:
    """What the drafter keeps of one batch row beside its pages."""

    last_inputs: Float[Tensor, " d2"] | None = None
    """What the layer reads of the last verified pair, which starts the next draft; None before there is a pair."""
    last_residual: Float[Tensor, " d"] | None = None
    tokens: list[int] = field(default_factory=list)
    """The row's text as far as it was observed: one token more than there are pairs."""


@final
class EagleDrafter(Drafter):
    """Drafts with an EAGLE head that sees the target's features.

    The head must have its embedding and `lm_head`, own or borrowed (`EagleHead.borrow`).
    """

    def __init__(
        self,
        head: EagleHead,
        make_pages: MakePages,
        config: EagleDraftConfig | None = None,
        prefixes: DraftPrefixes | None = None,
    ) -> None:
        """Args:
        prefixes: keeps pages of earlier texts, so that the target's features of them are not needed again.
        """
        self.prefixes = prefixes
        self.config = config or EagleDraftConfig()
        self.head = head.eval()
        self._make_pages = make_pages
        self._sliding_window = self.config.sliding_window or head.config.sliding_window
        self._max_positions = self.config.max_positions or head.config.max_positions
        self._scaling = head.config.head_dim**-0.5
        self._min_score = math.log(self.config.min_probability) if self.config.min_probability else float("-inf")
        self._token_ids, lm_weight = narrowed(head, self.config.vocabulary)
        self._lm_head: LmHead = Int8LmHead(lm_weight) if self.config.int8_lm_head else plain_lm_head(lm_weight)
        self._pages: DraftPages | None = None
        self._rows: list[Row] = []
        if self._sliding_window is not None and self._sliding_window <= self.config.depth:
            raise ConfigError(f"sliding_window={self._sliding_window}; accepted: more than depth={self.config.depth}")

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.config.taps

    def cache_length(self, row: int) -> int:
        """Verified pairs that the draft's cache holds for a batch row."""
        return self._open_pages().length(row)

    # -- life ---------------------------------------------------------------------------------------------------------

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> Sequence[int] | None:
        self.end()
        config = self.head.config
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim, self.head.dtype, self.head.device)
        self._pages = self._make_pages(shape, sum(len(prompt) + 64 for prompt in prompts))
        for _ in prompts:
            self._pages.add_row()
        self._rows = [Row() for _ in prompts]
        return None if self.prefixes is None else self._load(self.prefixes, self._pages, prompts)

    def _load(self, prefixes: DraftPrefixes, pages: DraftPages, prompts: tuple[Sequence[int], ...]) -> list[int]:
        """Fill rows with pairs of earlier texts; rows with equal prompts are forked from the first of them later."""
        first = {tuple(prompt): i for i, prompt in reversed(list(enumerate(prompts)))}
        ready = [0] * len(prompts)
        for prompt, i in first.items():
            ready[i] = prefixes.load(pages, i, prompt, len(prompt) - 1)
        for row, text, length in zip(self._rows, prompts, ready, strict=True):
            row.tokens = list(text[: length + 1])
        return ready

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        for row in copies:
            self._open_pages().refork(source, row)
            self._rows[row] = replace(self._rows[source], tokens=list(self._rows[source].tokens))

    def end(self) -> None:
        if self._pages is not None:
            if self.prefixes is not None:
                for number, row in enumerate(self._rows):
                    self.prefixes.keep(self._pages, number, row.tokens)
            self._pages.free_all()
            self._pages.check()
        self._pages = None
        self._rows = []

    def _open_pages(self) -> DraftPages:
        if self._pages is None:
            raise ConfigError("the drafter has no batch; call begin first")
        return self._pages

    # -- learning -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        """Take up the kept tokens with their true features; synchronises."""
        pages, head = self._open_pages(), self.head
        kept: list[int] = verdict.num_kept.tolist()
        live = [i for i, row in enumerate(window.rows) if self._takes(row, window.context_lengths[i], kept[i])]
        if not live:
            return
        path, tokens, counts = kept_pairs(window, verdict, live)
        index = path[..., None]
        taps = tuple(tap[live].gather(1, index.expand(-1, -1, tap.shape[2])) for tap in features)
        lengths = torch.tensor([window.context_lengths[i] for i in live], device=head.device)
        positions = lengths[:, None] + torch.arange(path.shape[1], device=head.device)
        inputs, residual = head.layer_inputs(head.embed(tokens), head.fuse(taps))
        k, v = head.keys_values(inputs, head.cos_sin(positions))
        rows = [window.rows[i] for i in live]
        for row, i in zip(rows, live, strict=True):
            # A step that failed behind `observe` left pairs that were never verified.
            pages.truncate(row, window.context_lengths[i])
        append(pages, rows, counts, k, v)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            text = self._rows[row].tokens
            if self.prefixes is not None:
                text = text[: window.context_lengths[live[i]] + 1] + tokens[i, :count].tolist()
            self._rows[row] = Row(inputs[i, count - 1].clone(), residual[i, count - 1].clone(), text)

    def _takes(self, row: int, context_length: int, num_kept: int) -> bool:
        """Whether the row's pairs are complete up to here, and still within the head's positions."""
        if self._open_pages().length(row) < context_length:
            return False
        return self._max_positions is None or context_length + num_kept <= self._max_positions

    # -- drafting -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, context: DraftContext) -> Draft:
        depths = [self._depth_limit(context, i) for i in range(len(context.rows))]
        nodes = [min(self.config.nodes, limit) for limit in context.max_nodes]
        live = [i for i, depth in enumerate(depths) if depth > 0]
        if not live:
            return Draft.empty(len(context.rows), context.roots.device)
        pool = self._grow(context, live, max(depths), max(nodes[i] for i in live))
        draft = pool.select([nodes[i] for i in live], [depths[i] for i in live], self._min_score)
        return draft if len(live) == len(context.rows) else spread(draft, live, len(context.rows))

    def _depth_limit(self, context: DraftContext, i: int) -> int:
        row, verified = context.rows[i], len(context.tokens[i]) - 1
        if context.max_nodes[i] < 1 or self._rows[row].last_inputs is None or self.cache_length(row) != verified:
            return 0
        limit = min(self.config.depth, context.max_depths[i])
        # A node of depth d comes out of the pair at position verified - 1 + (d - 1).
        return limit if self._max_positions is None else min(limit, self._max_positions - verified + 1)

    def _grow(self, context: DraftContext, live: list[int], depth: int, num_nodes: int) -> CandidatePool:
        """Run the head level by level: first the last verified pairs, then the frontier of the tree."""
        head, rows = self.head, tuple(context.rows[i] for i in live)
        prefix = Prefix.of(self._open_pages(), rows, head.device, self._sliding_window)
        pool = CandidatePool(len(rows), head.device)
        last = torch.tensor(prefix.lengths, device=head.device)[:, None] - 1
        cos, sin = head.cos_sin(last + torch.arange(depth, device=head.device))
        hidden = self._run_last_pairs(rows, prefix, (cos[:, :1], sin[:, :1]))
        frontier = pool.grow(*self._children(hidden, context, live, 1))
        tree = Tree()
        for level in range(1, depth):
            if pool.is_settled(num_nodes, self._min_score):
                break
            rotation = cos[:, level, None], sin[:, level, None]
            hidden = self._run_frontier(frontier, hidden, prefix, tree, rotation, level)
            frontier = pool.grow(*self._children(hidden, context, live, level + 1))
        return pool

    def _run_last_pairs(
        self, rows: tuple[int, ...], prefix: Prefix, rotation: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "b 1 d"]:
        head = self.head
        inputs = torch.stack([self._rows[row].last_inputs for row in rows])[:, None]  # type: ignore[misc]
        residual = torch.stack([self._rows[row].last_residual for row in rows])[:, None]  # type: ignore[misc]
        q = head.queries(inputs, rotation)
        return head.finish(residual, attend(q, prefix, 0, None, self._scaling))

    def _run_frontier(
        self,
        frontier: Frontier,
        hidden: Float[Tensor, "b f d"],
        prefix: Prefix,
        tree: Tree,
        rotation: tuple[Tensor, Tensor],
        level: int,
    ) -> Float[Tensor, "b k d"]:
        """One draft step: each node of the frontier with the hidden state of the node it hangs on."""
        head = self.head
        is_chain = frontier.parents.shape[1] == 1
        above = hidden if is_chain else hidden.gather(1, frontier.parents[..., None].expand(-1, -1, hidden.shape[2]))
        inputs, residual = head.layer_inputs(head.embed(frontier.tokens), above)
        tree.add(*head.keys_values(inputs, rotation), frontier.parents)
        q = head.queries(inputs, rotation)
        return head.finish(residual, attend(q, prefix, level, tree.view(), self._scaling))

    def _children(
        self, hidden: Float[Tensor, "b f d"], context: DraftContext, live: list[int], depth: int
    ) -> tuple[Float[Tensor, "b f k"], Int[Tensor, "b f k"]]:
        """The best tokens behind each node, and their log-probabilities."""
        logits = self._lm_head(self.head.lm_input(hidden))
        if context.noise is not None and self.config.follow_noise:
            # The target picks argmax(p / e): the same race, run with the head's p, puts its likely pick first.
            at = [(context.num_generated[i] + depth - 1, context.rows[i]) for i in live]
            noise = torch.stack([context.noise.at(index)[row] for index, row in at])
            noise = noise if self._token_ids is None else noise[:, self._token_ids]
            logits = logits.float() / context.temperature - noise[:, None, : logits.shape[2]].log()
        values, indices = best_of(logits, min(self.config.width, logits.shape[2]))
        log_probs = values.float() - logits.logsumexp(2, keepdim=True).float()
        return log_probs, indices if self._token_ids is None else self._token_ids[indices]


class Tree:
    """Keys and values of the draft nodes that were run, and who descends from whom."""

    def __init__(self) -> None:
        self._k: list[Tensor] = []
        self._v: list[Tensor] = []
        self._sees: Tensor | None = None

    def add(self, k: Float[Tensor, "b n h d"], v: Float[Tensor, "b n h d"], parents: Int[Tensor, "b n"]) -> None:
        """Add one level; `parents` point into the level before."""
        rows, nodes = parents.shape
        self._k.append(k)
        self._v.append(v)
        if nodes == 1:
            return
        own = torch.eye(nodes, dtype=torch.bool, device=k.device).expand(rows, -1, -1)
        if self._sees is None:
            self._sees = own
        else:
            inherited = self._sees.gather(1, parents[..., None].expand(-1, -1, self._sees.shape[2]))
            self._sees = torch.cat([inherited, own], dim=2)

    def view(self) -> tuple[Float[Tensor, "b m h d"], Float[Tensor, "b m h d"], Bool[Tensor, "b n m"] | None]:
        """All keys and values, and which of them the last level's nodes see (None: all, in a chain)."""
        return torch.cat(self._k, dim=1), torch.cat(self._v, dim=1), self._sees


def kept_pairs(
    window: Window, verdict: Verdict, live: list[int]
) -> tuple[Int[Tensor, "b k"], Int[Tensor, "b k"], list[int]]:
    """For some window rows: the kept nodes, the token behind each, and how many; padded with the first node."""
    counts: list[int] = verdict.num_kept[live].tolist()
    longest = max(counts)
    path = verdict.path[live][:, :longest].clamp(min=0)
    kept = window.tokens[live].gather(1, path)
    behind = torch.cat([kept[:, 1:], kept[:, :1]], dim=1)
    last = verdict.num_kept[live][:, None] - 1
    return path, behind.scatter(1, last, verdict.next_tokens[live][:, None]), counts


def spread(draft: Draft, live: list[int], num_rows: int) -> Draft:
    """Put the rows of a draft at their places in a batch in which the others draft nothing."""
    width = draft.tokens.shape[1]
    tokens, parents = (rows.new_zeros(num_rows, width) for rows in (draft.tokens, draft.parents))
    lengths = draft.lengths.new_zeros(num_rows)
    tokens[live], parents[live], lengths[live] = draft.tokens, draft.parents, draft.lengths
    return Draft(tokens, parents, lengths)
