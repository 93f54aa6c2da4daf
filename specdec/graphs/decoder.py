"""`GraphDecoder`: whole steps on the device, recorded once and replayed ahead of the host that reads their results.

The device moves rows on by itself, up to the number of tokens that the host has armed them for; then a row pauses.  The
host follows behind: it checks what was emitted, in order, against the stopping criteria, and arms or ends rows.  A row
that the host ends has perhaps run on meanwhile; what it emitted there is never looked at.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.config import SpecConfig, build_config, require_int
from specdec.decoder import Run, SpeculativeDecoder, unpadded_prompts
from specdec.draft.base import DraftContext, Drafter
from specdec.errors import ConfigError, NonFiniteLogits
from specdec.graphs.drafts import DeviceDrafter, NoDeviceDrafts
from specdec.graphs.recorder import StepRecorder
from specdec.graphs.records import RowStep, push_in_order
from specdec.graphs.session import Session, batch_bucket
from specdec.kv.deferred import DeferredWriter
from specdec.kv.pages import PagedKVCache
from specdec.sampling import Sampler
from specdec.target import Target
from specdec.types import CommitStats, Draft, StepRecord, Verdict, Window


@dataclass(frozen=True)
class GraphConfig:
    """How a `GraphDecoder` runs; unknown names and invalid values raise `ConfigError`."""

    run_ahead: int = 2
    """Steps that the device may be ahead of the host (0 to 64)."""
    max_graphs: int = 32
    """Recordings kept, least recently used out first."""
    page_size: int = 16
    """Tokens of one page: 1, 4, 16 or 64."""
    reserve: int = 4096
    """Tokens of output that a row gets pages for at once."""
    prefill_chunk: int = 2048
    """Most prompt tokens of one row run through the model at once."""

    def __post_init__(self) -> None:
        require_int("run_ahead", self.run_ahead, 0, 64)
        require_int("max_graphs", self.max_graphs, 1, None)
        require_int("reserve", self.reserve, 1, None)
        SpecConfig(page_size=self.page_size, prefill_chunk=self.prefill_chunk)

    @staticmethod
    def of(**values: object) -> GraphConfig:
        """Build a configuration from keyword arguments, refusing unknown names by name."""
        return build_config(GraphConfig, values)


@dataclass
class GraphRun:
    """The state of one generation."""

    base: Run
    session: Session
    stop_tokens: tuple[int, ...]
    armed: list[bool]
    """Rows that the device may move on, as far as the host knows."""
    key: Hashable
    """Of the step's recording."""
    bytes_per_token: int
    note: str | None = None
    """Why the last launched step was not a replay."""
    last_time: float = field(default_factory=time.perf_counter)

    def close(self) -> None:
        """Wait for steps that are on their way and give all pages back; may be called again."""
        self.session.mailbox.drop_all()
        self.base.close()

    def __enter__(self) -> GraphRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class GraphDecoder:
    """Decodes with recorded steps; equal to `SpeculativeDecoder` token for token where logits are equal."""

    def __init__(
        self,
        target: Target,
        prefill_target: Target | None = None,
        drafter: DeviceDrafter | None = None,
        config: GraphConfig | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        """Args:
        target: runs windows of at most 64 nodes without reading the device on the host (fused attention).
        prefill_target: runs prompts; None takes `target`.
        drafter: None decodes plainly.
        """
        self.target = target
        self.drafter = drafter or NoDeviceDrafts()
        self.config = config or GraphConfig()
        self.recorder = StepRecorder(capacity=self.config.max_graphs) if recorder is None else recorder
        spec = SpecConfig(page_size=self.config.page_size, prefill_chunk=self.config.prefill_chunk)
        self._prefiller = SpeculativeDecoder(prefill_target or target, _PrefillObserver(self.drafter), config=spec)
        self._cache: PagedKVCache | None = None
        self._sessions: dict[int, Session] = {}

    def refusal(self, sampler: Sampler) -> str | None:
        """Why the sampler's wishes need a step on the host; None where they do not."""
        if not sampler.scores_only:
            return "logits processors look at the text"
        if sampler.lockstep:
            return "processors or criteria look at the batch as a whole"
        if sampler.keeps_records:
            return "scores or logits are to be kept"
        if sampler.prompts.device.type != "cpu":
            return (
                "the sampler's prompts lie on a device, so that looking at tokens would wait for steps that run ahead"
            )
        return None

    def stream(
        self,
        input_ids: Int[Tensor, "B t"],
        attention_mask: Tensor | None = None,
        *,
        sampler: Sampler,
        max_length: int,
        stop_tokens: Sequence[int] = (),
    ) -> Iterator[StepRecord]:
        """Generate for a batch of prompts and yield one record per step; the arguments are those of `start`."""
        start = self.start(input_ids, attention_mask, sampler=sampler, max_length=max_length, stop_tokens=stop_tokens)
        with start as run:
            while sampler.active_rows:
                yield self.step(run)

    def start(
        self,
        input_ids: Int[Tensor, "B t"],
        attention_mask: Tensor | None = None,
        *,
        sampler: Sampler,
        max_length: int,
        stop_tokens: Sequence[int] = (),
    ) -> GraphRun:
        """Prefill a batch of prompts and return the run, ready for `step`; close it before the next.

        Args:
            sampler: says when a row is done; its prompts lie on the host (see `refusal` for what else it may ask).
            max_length: most tokens of a row, prompt (padding included) and output.
            stop_tokens: tokens at which the device pauses a row by itself, so that no work is wasted behind them.
        """
        reason = self.refusal(sampler)
        if reason is not None:
            raise ConfigError(f"recorded steps cannot serve this request: {reason}; accepted: SpeculativeDecoder")
        prompts = unpadded_prompts(input_ids, attention_mask)
        room = max_length - input_ids.shape[1]
        if room < 1:
            raise ConfigError(f"max_length={max_length}; accepted: more than the prompt's {input_ids.shape[1]} tokens")
        sampler.limit(room)
        longest = max(map(len, prompts)) + room
        cache = self._cache_for(
            len(prompts) * (longest - room + min(room, self.config.reserve) + self.config.page_size)
        )
        drafter = self._prefiller.drafter
        base = Run(cache, DeferredWriter(cache), drafter, sampler, prompts, [room] * len(prompts), self.target.device)
        try:
            drafter.begin(tuple(prompts), longest)
            self._prefiller.prefill(base)
            session = self._session_for(len(prompts), longest)
            session.load([tokens[-1] for tokens in prompts])
            self.drafter.bind(session.rows, self.target.device)
        except BaseException:
            base.close()
            raise
        stops = tuple(stop_tokens)
        key = session.key(sampler.processors, sampler.noise is not None, stops)
        return GraphRun(base, session, stops, [False] * len(prompts), key, cache.bytes_per_token)

    def step(self, run: GraphRun) -> StepRecord:
        """The next step in which some row emitted something; launches further steps ahead of it.

        Waits for the device.  Raises `NonFiniteLogits` where a pick met NaN.
        """
        while True:
            self._arm_paused_rows(run)
            while self._may_launch(run):
                self._launch(run)
            record = self._settle(run, run.session.mailbox.take())
            if record is not None:
                return record

    # -- inside -------------------------------------------------------------------------------------------------------

    def _may_launch(self, run: GraphRun) -> bool:
        """Whether one more step is of use: each one on its way emits at least a token of every row that goes on."""
        going = [run.base.remaining[row] for row, armed in enumerate(run.armed) if armed]
        mailbox = run.session.mailbox
        return bool(going) and not mailbox.is_full and len(mailbox) < max(going)

    def _launch(self, run: GraphRun) -> None:
        sampler, session = run.base.sampler, run.session
        if sampler.noise is not None:
            generated = [sampler.num_generated(row) for row in sampler.active_rows]
            ahead = (len(session.mailbox) + 1) * self.drafter.most_kept
            first, last = min(generated), max(generated) + ahead
            if not session.has_noise(first, last):
                session.make_noise_ring(2 * (last - first) + 64, self.target.vocab_size)
                self._forget_recordings()
            session.fill_noise(sampler.noise, first, last)
        program = session.program(run.key, sampler.processors, sampler.noise is not None, run.stop_tokens)
        run.note = self.recorder.run(run.key, program)
        session.mailbox.post(session.buffers.record)

    def _arm_paused_rows(self, run: GraphRun) -> None:
        """Give pages and a limit to rows that the device has paused though they are not done."""
        base = run.base
        for row in base.sampler.active_rows:
            if run.armed[row]:
                continue
            tokens = min(base.remaining[row], self.config.reserve)
            pages_before = base.cache.allocator.num_pages
            base.cache.reserve([row], [tokens])
            if base.cache.allocator.num_pages != pages_before:
                # The storage has moved, and recordings point to where it was.
                self._forget_recordings()
            run.session.arm(row, tokens)
            run.armed[row] = True

    def _settle(self, run: GraphRun, record: list[list[int]]) -> StepRecord | None:
        """Make a record history, token by token; None where no row emitted anything."""
        base, sampler = run.base, run.base.sampler
        # Rows that were paused or done when the step ran kept nothing; those that ended on the host are not active.
        steps = {row: RowStep.of(record[row]) for row in sampler.active_rows if record[row][0] > 0}
        if not steps:
            return None
        if any(step.next_token < 0 for step in steps.values()):
            raise NonFiniteLogits("the target's scores hold NaN; no token can be picked")
        emitted = push_in_order(sampler, {row: step.emitted for row, step in steps.items()})
        sampler.settle()
        for row, step in steps.items():
            base.cache.advance(row, step.num_kept)
            base.tokens[row] += emitted[row]
            base.remaining[row] -= len(emitted[row])
            if step.paused:
                run.armed[row] = False
            elif sampler.done[row]:
                run.session.halt(row)
                run.armed[row] = False
        return self._record(run, steps, emitted)

    def _record(self, run: GraphRun, steps: dict[int, RowStep], emitted: dict[int, list[int]]) -> StepRecord:
        base, now = run.base, time.perf_counter()
        took, run.last_time = (now - run.last_time) * 1e3, now
        base.num_steps += 1
        staged, kept = (sum(len(s.tokens) for s in steps.values()), sum(s.num_kept for s in steps.values()))
        return StepRecord(
            index=base.num_steps - 1,
            rows=tuple(steps),
            roots=[step.tokens[0] for step in steps.values()],
            draft_tokens=[step.tokens[1:] for step in steps.values()],
            draft_parents=[step.parents[1:] for step in steps.values()],
            accepted_nodes=[step.path[1 : len(emitted[row])] for row, step in steps.items()],
            emitted=list(emitted.values()),
            stopped=[base.sampler.done[row] for row in steps],
            commit=CommitStats(staged, kept, kept * run.bytes_per_token, "device"),
            timings_ms={"step": took},
            notes={} if run.note is None else {"uncaptured": run.note},
        )

    def _cache_for(self, num_tokens: int) -> PagedKVCache:
        """The cache, empty, with room for so many tokens."""
        pages = -(-num_tokens // self.config.page_size)
        if self._cache is not None and self._cache.allocator.num_free != self._cache.allocator.num_pages:
            raise ConfigError("a run is still open; close it before the next one starts")
        if self._cache is None:
            self._cache = PagedKVCache(self.target.layers, pages, self.config.page_size, growable=True)
        elif self._cache.allocator.num_pages < pages:
            self._cache.grow(pages - self._cache.allocator.num_pages)
            self._forget_recordings()
        return self._cache

    def _session_for(self, rows: int, longest: int) -> Session:
        assert self._cache is not None
        bucket, wanted = batch_bucket(rows), -(-longest // self.config.page_size) + 1
        if bucket not in self._sessions or self._sessions[bucket].max_pages < wanted:
            max_pages = 1 << (max(wanted, 64) - 1).bit_length()
            self._sessions[bucket] = Session(
                self.target, self.drafter, self._cache, bucket, max_pages, self.config.run_ahead
            )
            self._forget_recordings()
        return self._sessions[bucket]

    def _forget_recordings(self) -> None:
        """Pages or buffers have moved: every recording is stale."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        self.recorder.clear()
        for session in self._sessions.values():
            session.forget_programs()


@final
class _PrefillObserver(Drafter):
    """Shows prefill windows to a `DeviceDrafter`; on the host it drafts nothing."""

    def __init__(self, drafter: DeviceDrafter) -> None:
        self._drafter = drafter

    @property
    def taps(self) -> tuple[int, ...]:
        return self._drafter.taps

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        self._drafter.begin(prompts, max_length)

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        self._drafter.fork(source, copies)

    def propose(self, context: DraftContext) -> Draft:
        return Draft.empty(len(context.rows), context.roots.device)

    def observe(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        self._drafter.observe_prefill(window, features, verdict)

    def end(self) -> None:
        self._drafter.end()
