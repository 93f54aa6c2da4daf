"""A smaller model drafts: the same `Target` interface, with a paged cache of its own.

(Leviathan et al. 2022, arXiv:2211.17192.)  When sampling, each draft is picked with the target's own noise of that
index: two exponential races over the same variates agree more often than independent samples, and drafts stay a
function of the past (Daliri et al. 2025, arXiv:2408.07978).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.config import build_config, require_int, require_number
from specdec.draft.base import DraftContext, Drafter
from specdec.errors import ConfigError
from specdec.kv.writer import KVWriter
from specdec.sampling import Noise, pick_tokens
from specdec.target import LayerShape, Target, TargetOutput
from specdec.types import MAX_WINDOW, Draft, Verdict, Window

logger = logging.getLogger(__name__)


class AssistantCache(Protocol):
    """What the drafter asks of its paged cache; see `PagedKVCache`."""

    def add_row(self) -> int: ...

    def fork(self, source: int) -> int: ...

    def truncate(self, row: int, length: int) -> None: ...

    def free_all(self) -> None: ...


StoreFactory = Callable[[tuple[LayerShape, ...], int, int], tuple[AssistantCache, KVWriter]]
"""`(layers, number of rows, most tokens of a row) → (cache, a writer into it)`."""


@dataclass(frozen=True)
class AssistantConfig:
    """How much an assistant drafts."""

    num_drafts: int = 5
    """Most drafted tokens of a row in one step."""
    min_probability: float = 0.0
    """A row's draft ends with the first token that the assistant gives less probability than this."""
    common_vocabulary: bool = False
    """Accept an assistant whose vocabulary has another size, and draft the ids that both have."""
    prefill_chunk: int = 512
    """Most tokens of one row run through the assistant at once."""

    def __post_init__(self) -> None:
        require_int("num_drafts", self.num_drafts, 1, MAX_WINDOW - 1)
        require_number("min_probability", self.min_probability, 0.0, 1.0)
        if not isinstance(self.common_vocabulary, bool):
            raise ConfigError(f"common_vocabulary={self.common_vocabulary!r}; accepted: True, False")
        require_int("prefill_chunk", self.prefill_chunk, 2, None)


@dataclass
class _Row:
    """One batch row as the assistant's cache holds it."""

    number: int
    """Row of the cache."""
    held: list[int] = field(default_factory=list)
    """Tokens whose K/V stand in the cache: the row's text, and drafts behind it."""
    agreed: int = 0
    """Tokens of `held` known to be those of the row's text, which only grows."""


@dataclass
class _Chain:
    """A draft in the making."""

    row: _Row
    batch_row: int
    index: int
    """Generated index of the next drafted token."""
    wanted: int
    """Tokens still to draft."""
    waiting: list[int]
    """Tokens to run before the next one can be drafted; the last is the root or the last draft."""
    drafted: list[int] = field(default_factory=list)


@final
class AssistantDrafter(Drafter):
    """Drafts a chain with a smaller model, token by token, for all rows at once.

    Its cache heals itself: whatever became of earlier drafts, each proposal keeps what the row's text and the cache
    have in common and runs the rest.  A row gets no drafts any more where the assistant's context or vocabulary ends.
    """

    def __init__(
        self,
        assistant: Target,
        target_vocab_size: int,
        make_store: StoreFactory,
        config: AssistantConfig | None = None,
    ) -> None:
        """Args:
        target_vocab_size: ids that the target knows; raises `ConfigError` where the assistant knows another number of
            them, unless the configuration accepts that.
        make_store: makes the assistant's cache and writer at each `begin`.
        """
        self.config = config or AssistantConfig()
        own = assistant.vocab_size
        if own != target_vocab_size and not self.config.common_vocabulary:
            raise ConfigError(
                f"assistant with a vocabulary of {own} ids for a target of {target_vocab_size}; accepted: the same "
                "tokenizer and size, or common_vocabulary=True where one only pads the other"
            )
        self._assistant = assistant
        self._target_vocab_size = target_vocab_size
        self._common_size = min(own, target_vocab_size)
        self._make_store = make_store
        self._store: tuple[AssistantCache, KVWriter] | None = None
        self._prompts: tuple[Sequence[int], ...] = ()
        self._rows: list[_Row] = []
        self._has_warned = False

    @staticmethod
    def of(
        assistant: Target,
        target_vocab_size: int,
        make_store: StoreFactory,
        **options: Any,
    ) -> AssistantDrafter:
        """Build from the options of `AssistantConfig`; unknown names raise `ConfigError`."""
        config = build_config(AssistantConfig, options)
        return AssistantDrafter(assistant, target_vocab_size, make_store, config)

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        self.end()
        limit = self._assistant.max_length
        longest = max_length if limit is None else min(limit, max_length)
        cache, writer = self._make_store(self._assistant.layers, len(prompts), longest)
        self._store = cache, writer
        self._prompts = prompts
        self._rows = [_Row(cache.add_row()) for _ in prompts]

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        """Run the common prompt once and share its pages."""
        cache, _ = self._open_store
        row, prompt = self._rows[source], self._prompts[source]
        if self._room(prompt) < 1:
            return
        self._prefill([_Chain(row, source, 0, 0, list(prompt[len(row.held) :]))], most_left=1)
        for copy in copies:
            self._rows[copy] = _Row(cache.fork(row.number), list(row.held), len(row.held))

    def propose(self, context: DraftContext) -> Draft:
        """Chains of unequal lengths; synchronises once for each drafted token."""
        chains = [self._chain(context, i) for i in range(len(context.rows))]
        drafting = [chain for chain in chains if chain.wanted > 0]
        self._prefill(drafting, most_left=self.config.num_drafts + 1)
        while drafting:
            output = self._run(drafting, [chain.waiting for chain in drafting])
            last = torch.tensor([len(chain.waiting) - 1 for chain in drafting])
            assert output.logits is not None
            scores = self._scores(output.logits[torch.arange(len(drafting)), last], context.temperature)
            self._extend(drafting, scores, context.noise)
            drafting = [chain for chain in drafting if chain.wanted > 0]
        return Draft.chains([chain.drafted for chain in chains], context.roots.device)

    def observe(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        """Nothing to learn: the next context holds the emitted tokens."""

    def end(self) -> None:
        """Give all pages back."""
        if self._store is not None:
            cache, writer = self._store
            writer.abort()
            cache.free_all()
        self._store = None
        self._prompts = ()
        self._rows = []
        self._has_warned = False

    @property
    def _open_store(self) -> tuple[AssistantCache, KVWriter]:
        if self._store is None:
            raise ConfigError("AssistantDrafter is used before `begin`; accepted: begin → propose → end")
        return self._store

    def _chain(self, context: DraftContext, i: int) -> _Chain:
        """The empty chain of a context's row, behind what the cache keeps of the row."""
        row, tokens = self._rows[context.rows[i]], context.tokens[i]
        wanted = min(self.config.num_drafts, context.max_nodes[i], context.max_depths[i], self._room(tokens))
        waiting = self._rewind(row, tokens) if wanted > 0 else []
        return _Chain(row, context.rows[i], context.num_generated[i], wanted, waiting)

    def _room(self, tokens: Sequence[int]) -> int:
        """Drafts for which the assistant has positions left; none behind a token that it does not know."""
        if self._common_size < self._target_vocab_size and max(tokens) >= self._common_size:
            return 0
        limit = self._assistant.max_length
        # The last draft is not run, so it may lie just behind the last position.
        return MAX_WINDOW if limit is None else limit - len(tokens) + 1

    def _rewind(self, row: _Row, tokens: Sequence[int]) -> list[int]:
        """Keep what cache and text have in common, less the root, whose scores are needed; returns what to run."""
        cache, _ = self._open_store
        end = min(len(row.held), len(tokens) - 1)
        common = min(row.agreed, end)
        while common < end and row.held[common] == tokens[common]:
            common += 1
        cache.truncate(row.number, common)
        del row.held[common:]
        row.agreed = common
        return list(tokens[common:])

    def _prefill(self, chains: list[_Chain], most_left: int) -> None:
        """Run all but the root, in chunks and without scores, of rows with more than `most_left` tokens waiting."""
        while long := [chain for chain in chains if len(chain.waiting) > most_left]:
            pieces = [chain.waiting[:-1][: self.config.prefill_chunk] for chain in long]
            self._run(long, pieces, need_logits=False)
            for chain, piece in zip(long, pieces, strict=True):
                chain.waiting = chain.waiting[len(piece) :]

    def _run(self, chains: list[_Chain], pieces: list[list[int]], need_logits: bool = True) -> TargetOutput:
        """Run a piece of text behind what the cache holds of each row, and keep it."""
        _, writer = self._open_store
        numbers = tuple(chain.row.number for chain in chains)
        lengths = tuple(len(chain.row.held) for chain in chains)
        window = Window.chain(pieces, numbers, lengths, self._assistant.device)
        try:
            writer.begin(window)
            output = self._assistant.forward(window, writer, need_logits=need_logits)
            writer.commit(Verdict.keep_all(window, window.tokens[:, 0]))
        except BaseException:
            writer.abort()
            raise
        for chain, piece in zip(chains, pieces, strict=True):
            chain.row.held += piece
        return output

    def _scores(self, logits: Float[Tensor, "n own"], temperature: float) -> Float[Tensor, "n v"]:
        """Scores over the target's ids at its temperature; ids that the assistant lacks cannot be picked."""
        scores = logits[:, : self._common_size].float() / temperature
        missing = self._target_vocab_size - self._common_size
        return torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)

    def _extend(self, chains: list[_Chain], scores: Float[Tensor, "n v"], noise: Noise | None) -> None:
        """Add a token to each chain; end those that have enough, are unsure, or have no finite scores; synchronises."""
        variates = None
        if noise is not None:
            variates = torch.stack([noise.at(chain.index)[chain.batch_row] for chain in chains])
            scores = scores.to(variates.device)
        is_sound = scores.amax(-1).isfinite()
        scores = scores.masked_fill(~is_sound[:, None], 0.0)
        tokens = pick_tokens(scores, variates)
        probabilities = scores.softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        picks = zip(chains, tokens.tolist(), probabilities.tolist(), is_sound.tolist(), strict=True)
        for chain, token, probability, sound in picks:
            if not sound:
                self._warn_of_unsound_scores(chain.batch_row)
                chain.wanted = 0
                continue
            chain.drafted.append(token)
            chain.waiting = [token]
            chain.index += 1
            chain.wanted = chain.wanted - 1 if probability >= self.config.min_probability else 0

    def _warn_of_unsound_scores(self, row: int) -> None:
        """Say once in a generation that the assistant is broken; the text does not depend on it, the speed does."""
        if not self._has_warned:
            logger.warning("the assistant's scores hold NaN or infinities (row %d); it drafts nothing there", row)
        self._has_warned = True
