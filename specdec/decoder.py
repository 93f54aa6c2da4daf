"""The loop.  Read this first: `step` is the algorithm, `stream` is its life, everything else is book-keeping.

One step: propose → begin → target forward (stages, attends) → verify → observe → commit.
The commit comes last, so that whatever fails before it leaves the cache as it was before the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.config import SpecConfig
from specdec.draft.base import DraftContext, Drafter
from specdec.draft.none import NoDrafter
from specdec.errors import ConfigError
from specdec.kv.deferred import DeferredWriter
from specdec.kv.pages import PagedKVCache
from specdec.kv.prefix import PrefixCache
from specdec.kv.writer import KVWriter
from specdec.sampling import Sampler
from specdec.target import Target
from specdec.types import CommitStats, Draft, StepRecord, Verdict, Window
from specdec.verify.base import Verifier
from specdec.verify.eager import EagerVerifier

LARGEST_FIRST_RESERVATION = 8192
"""Tokens of output that a cache has room for from the start; longer generations let it grow."""


class SpeculativeDecoder:
    """Drafts, verifies and commits, over pages, until every row is done."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        writer: Callable[[PagedKVCache], KVWriter] = DeferredWriter,
        verifier: Verifier | None = None,
        config: SpecConfig | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """Args:
        drafter: None decodes plainly.
        writer: makes the `KVWriter` of a generation from its cache (a writer class will do).
        verifier: None takes the eager reference.
        prefixes: keeps pages of earlier texts, which prompts that begin alike need not run again; of one model only.
        """
        self.target = target
        self.drafter = drafter or NoDrafter()
        self.make_writer = writer
        self.verifier = verifier or EagerVerifier()
        self.config = config or SpecConfig()
        self.prefixes = prefixes

    def step(self, run: Run) -> StepRecord:
        """Advance every active row by at least one token; on any exception the cache is as before the step."""
        clock = Clock()
        context = run.draft_context(self.config.max_drafts)
        try:
            draft = self.drafter.propose(context)
            check_draft(draft, context, self.target.vocab_size)
            clock.lap("draft")
            window = Window.over(context.roots, draft, context.rows, run.lengths(context.rows))
            run.writer.begin(window)
            output = self.target.forward(window, run.writer, self.drafter.taps)
            clock.lap("target")
            assert output.logits is not None
            # The one host synchronisation of a step: processors and stopping criteria live on the host, and so does
            # the walk.
            verdict = self.verifier.verify(output.logits, window, run.sampler)
            clock.lap("verify")
            self.drafter.observe(window, output.features, verdict)
            clock.lap("observe")
            commit = run.writer.commit(verdict)
            clock.lap("commit")
        except BaseException:
            run.writer.abort()
            run.sampler.rollback()
            raise
        return run.settle(window, draft, verdict, commit, clock.laps)

    def stream(
        self, input_ids: Int[Tensor, "B t"], attention_mask: Tensor | None = None, *, sampler: Sampler, max_length: int
    ) -> Iterator[StepRecord]:
        """Generate for a batch of prompts and yield one record per step; the arguments are those of `start`.

        `sampler` holds the emitted tokens.  All pages are back when the iterator ends, fails or is closed.
        """
        with self.start(input_ids, attention_mask, sampler=sampler, max_length=max_length) as run:
            while run.sampler.active_rows:
                yield self.step(run)

    def start(
        self, input_ids: Int[Tensor, "B t"], attention_mask: Tensor | None = None, *, sampler: Sampler, max_length: int
    ) -> Run:
        """Prefill a batch of prompts and return the run, ready for `step`; close it, or use it as a context manager.

        Args:
            input_ids: prompts, padded on the left; `attention_mask` hides the padding.
            sampler: picks the tokens and says when a row is done.
            max_length: most tokens of a row, prompt (padding included) and output.

        Raises `ConfigError` for bad prompts and lengths, `OutOfPages` where `num_pages` is too small.
        """
        prompts = unpadded_prompts(input_ids, attention_mask)
        room = max_length - input_ids.shape[1]
        if room < 1:
            raise ConfigError(f"max_length={max_length}; accepted: more than the prompt's {input_ids.shape[1]} tokens")
        sampler.limit(room)
        longest = max(map(len, prompts))
        config = self.config
        per_row = longest + min(room, LARGEST_FIRST_RESERVATION) + config.max_drafts + 1
        num_pages = config.num_pages or len(prompts) * -(-per_row // config.page_size)
        cache = PagedKVCache(
            self.target.layers,
            num_pages,
            config.page_size,
            growable=config.num_pages is None,
            kv_dtype=config.kv_dtype,
            layer_scales=config.kv_scales,
        )
        writer = self.make_writer(cache)
        run = Run(cache, writer, self.drafter, sampler, prompts, [room] * len(prompts), self.target.device)
        try:
            ready = self.drafter.begin(tuple(prompts), longest + room)
            if self.prefixes is not None:
                load_prefixes(run, self.prefixes, ready)
            self.prefill(run)
        except BaseException:
            run.close()
            raise
        run.prefixes = self.prefixes
        return run

    def prefill(self, run: Run) -> None:
        """Commit all prompts but their last tokens, each distinct prompt once; rows with equal prompts share its
        pages."""
        first_with: dict[tuple[int, ...], int] = {}
        while run.cache.num_rows < len(run.tokens):
            run.cache.add_row()
        for row, tokens in enumerate(run.tokens):
            first_with.setdefault(tuple(tokens), row)
        while rows := tuple(row for row in sorted(first_with.values()) if run.num_unfilled(row) > 0):
            lengths = run.lengths(rows)
            starts = list(zip(rows, lengths, strict=True))
            pieces = [run.tokens[row][start:-1][: self.config.prefill_chunk] for row, start in starts]
            window = Window.chain(pieces, rows, lengths, self.target.device)
            followers = [
                run.tokens[row][start + len(piece)] for (row, start), piece in zip(starts, pieces, strict=True)
            ]
            verdict = Verdict.keep_all(window, torch.tensor(followers, device=self.target.device))
            try:
                run.writer.begin(window)
                output = self.target.forward(window, run.writer, self.drafter.taps, need_logits=False)
                self.drafter.observe(window, output.features, verdict)
                run.writer.commit(verdict)
            except BaseException:
                run.writer.abort()
                raise
        for source in first_with.values():
            twins = tuple(row for row, tokens in enumerate(run.tokens) if first_with[tuple(tokens)] == source != row)
            for row in twins:
                run.cache.refork(source, row)
            if twins:
                self.drafter.fork(source, twins)


@dataclass
class Run:
    """The state of one generation; closing it gives all pages back."""

    cache: PagedKVCache
    writer: KVWriter
    drafter: Drafter
    sampler: Sampler
    tokens: list[list[int]]
    """Prompt and emitted tokens of each batch row, without padding."""
    remaining: list[int]
    """Tokens that each row may still emit."""
    device: torch.device
    num_steps: int = field(default=0)
    prefixes: PrefixCache | None = None
    """Where the pages go when the run is closed after all has gone well."""

    def num_unfilled(self, row: int) -> int:
        """Tokens of a row that have yet to be committed before the last one can be its root."""
        return len(self.tokens[row]) - 1 - self.cache.length(row)

    def lengths(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Committed tokens of some rows."""
        return tuple(self.cache.length(row) for row in rows)

    def draft_context(self, max_drafts: int) -> DraftContext:
        """What the drafter is told: it may go as deep as tokens are left to emit, less the one that every step
        gives."""
        rows = self.sampler.active_rows
        return DraftContext(
            rows=rows,
            tokens=tuple(self.tokens[row] for row in rows),
            roots=torch.tensor([self.tokens[row][-1] for row in rows], device=self.device),
            max_nodes=tuple(max_drafts if self.remaining[row] > 1 else 0 for row in rows),
            max_depths=tuple(self.remaining[row] - 1 for row in rows),
            num_generated=tuple(self.sampler.num_generated(row) for row in rows),
            temperature=self.sampler.temperature,
            noise=self.sampler.noise,
        )

    def settle(
        self, window: Window, draft: Draft, verdict: Verdict, commit: CommitStats, timings: dict[str, float]
    ) -> StepRecord:
        """The step stands: its tokens become history."""
        emitted = verdict.emitted(window)
        roots = [self.tokens[row][-1] for row in window.rows]
        self.sampler.settle()
        for row, tokens in zip(window.rows, emitted, strict=True):
            self.tokens[row] += tokens
            self.remaining[row] -= len(tokens)
        drafted = draft.lengths.tolist()
        kept = verdict.num_kept.tolist()
        self.num_steps += 1
        return StepRecord(
            index=self.num_steps - 1,
            rows=window.rows,
            roots=roots,
            draft_tokens=[row[:n] for row, n in zip(draft.tokens.tolist(), drafted, strict=True)],
            draft_parents=[row[:n] for row, n in zip(draft.parents.tolist(), drafted, strict=True)],
            accepted_nodes=[path[1:n] for path, n in zip(verdict.path.tolist(), kept, strict=True)],
            emitted=emitted,
            stopped=verdict.stopped.tolist(),
            commit=commit,
            timings_ms=timings,
            notes={**draft.notes, **verdict.notes},
        )

    def close(self) -> None:
        """Give all pages back and let the drafter forget the batch; may be called again."""
        self.writer.abort()
        prefixes, self.prefixes = self.prefixes, None
        if prefixes is not None:
            for row, tokens in enumerate(self.tokens):
                prefixes.keep(self.cache, row, tokens)
        self.cache.free_all()
        self.cache.check()
        self.drafter.end()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and kind is not GeneratorExit:
            # What a failed run computed is not passed on: it may hold NaN.
            self.prefixes = None
        self.close()


def load_prefixes(run: Run, prefixes: PrefixCache, ready: Sequence[int] | None) -> None:
    """Fill the run's rows with kept pages; where the drafter needs features, no further than it is `ready` for, and
    never so far that it sees none."""
    seen: set[tuple[int, ...]] = set()
    for row, tokens in enumerate(run.tokens):
        run.cache.add_row()
        limit = len(tokens) - 1
        if run.drafter.taps:
            limit = min(limit - 1, 0 if ready is None else ready[row])
        # Rows with equal prompts share the pages of the first.
        if tuple(tokens) not in seen:
            prefixes.load(run.cache, row, tokens, max(0, limit))
        seen.add(tuple(tokens))


def check_draft(draft: Draft, context: DraftContext, vocab_size: int) -> None:
    """Raise `ConfigError` where a drafter broke its contract: rows, sizes, parents, token ids, twins."""
    if len(draft.tokens) != len(context.rows):
        raise ConfigError(
            f"the drafter returned {len(draft.tokens)} rows; accepted: {len(context.rows)}, one per active row"
        )
    draft.validate(vocab_size)
    for row, (length, allowed) in enumerate(zip(draft.lengths.tolist(), context.max_nodes, strict=True)):
        if length > allowed:
            raise ConfigError(f"draft row {row} has {length} nodes; accepted: at most {allowed} (max_nodes)")


class Clock:
    """Wall time between laps (ms)."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap under `name`."""
        now = time.perf_counter()
        self.laps[name] = (now - self._last) * 1e3
        self._last = now


def unpadded_prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The prompts without masked tokens, whose positions then count the visible ones only, as transformers counts them.

    Raises `ConfigError` for empty prompts and for a masked last token (right padding).
    """
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ConfigError(
            f"input_ids of shape {tuple(input_ids.shape)}; accepted: [batch, tokens], at least one of each"
        )
    if attention_mask is None:
        return input_ids.tolist()
    if attention_mask.shape != input_ids.shape:
        raise ConfigError(f"attention_mask of shape {tuple(attention_mask.shape)}; accepted: {tuple(input_ids.shape)}")
    for row, last in enumerate(attention_mask[:, -1].tolist()):
        if not last:
            raise ConfigError(
                f"attention_mask row {row} masks the last prompt token (right padding); accepted: padding on the left "
                "(set the tokenizer's padding_side='left')"
            )
    masked = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
    return [[token for token, visible in zip(ids, mask, strict=True) if visible] for ids, mask in masked]
