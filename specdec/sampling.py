"""The sampling law: processed distributions, position-keyed noise, picks, and when to stop.

The token with generated index `t` is `argmax(p / e_t)`, where `p` is the processed distribution and `e_t` are
exponential variates
drawn once per index, in order, as one `[b, v]` tensor: exactly what `torch.multinomial` does for one sample.  The noise
is keyed by the index of the token and not by the step, so one seed gives one text however many steps led there.
(The exponential-race form of the Gumbel-max trick; Maddison et al. 2014, arXiv:1411.0030, section 2.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import NonFiniteLogits

Processor = Callable[[Tensor, Tensor], Tensor]
"""`(ids [n t], scores [n v]) → scores [n v]`, the signature of a Hugging Face `LogitsProcessor`."""

Criterion = Callable[[Tensor, Any], Tensor | bool]
"""`(ids [n t], scores so far) → done [n]`, the signature of a Hugging Face `StoppingCriteria`."""


class Noise(ABC):
    """Exponential variates for every generated index, the same however often and in whatever order they are asked
    for."""

    @abstractmethod
    def at(self, index: int) -> Float[Tensor, "B v"]:
        """Variates for the token with generated index `index` (0 is the first), one row for each of the `B` batch
        rows."""


class GeneratorNoise(Noise):
    """Noise from a torch generator's stream, drawn in index order and kept, or drawn again from a saved state.

    `generator_state` is where the stream starts; the generator it came from is not touched.  `state_after(t)` is the
    state in
    which plain decoding would leave it after `t` tokens.
    """

    def __init__(
        self,
        generator_state: Tensor,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        max_cached_bytes: int = 256 << 20,
    ) -> None:
        self._generator = torch.Generator(device)
        self._states = [generator_state.clone()]
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._drawn: OrderedDict[int, Tensor] = OrderedDict()
        self._max_cached = max(1, max_cached_bytes // (4 * num_rows * vocab_size))

    def at(self, index: int) -> Float[Tensor, "B v"]:
        if index not in self._drawn:
            for missing in range(min(index, len(self._states) - 1), index + 1):
                self._draw(missing)
        return self._drawn[index]

    def state_after(self, num_tokens: int) -> Tensor:
        """Generator state after the noise of `num_tokens` tokens was drawn."""
        while len(self._states) <= num_tokens:
            self._draw(len(self._states) - 1)
        return self._states[num_tokens]

    def _draw(self, index: int) -> None:
        self._generator.set_state(self._states[index])
        self._drawn[index] = torch.empty(self._shape, device=self._device).exponential_(1, generator=self._generator)
        if len(self._states) == index + 1:
            self._states.append(self._generator.get_state())
        while len(self._drawn) > self._max_cached:
            self._drawn.popitem(last=False)


def pick_tokens(scores: Float[Tensor, "n v"], noise: Float[Tensor, "n v"] | None) -> Int[Tensor, " n"]:
    """One token per row: the argmax when `noise` is None, a sample otherwise.  Raises `NonFiniteLogits`;
    synchronises."""
    tokens = pick_or_flag(scores, noise)
    if bool((tokens < 0).any()):
        raise NonFiniteLogits(NO_PICK)
    return tokens


NO_PICK = "the target's scores hold NaN, or no token has a finite score; no token can be picked"


def pick_or_flag(scores: Float[Tensor, "*n v"], noise: Float[Tensor, "*n v"] | None) -> Int[Tensor, "*n"]:
    """What `pick_tokens` picks, and -1 where there is nothing to pick from; reads nothing on the host."""
    if noise is None:
        # max returns a NaN where there is one, so looking at the picked score is enough.
        best, tokens = scores.max(-1)
        return tokens.masked_fill(best.isnan(), -1)
    probs = scores.softmax(-1)
    return (probs / noise).argmax(-1).masked_fill(probs.isnan().any(-1), -1)


class Sampler:
    """Picks tokens for the rows of a batch, one emitted token at a time, and says when a row is done.

    It works on *pending* tokens: what the running step would emit.  `settle` makes them history, `rollback` forgets
    them.
    Processors and criteria see, for each token, exactly the prefix that plain decoding would pass, left padding
    included.
    """

    def __init__(
        self,
        prompts: Int[Tensor, "B t"],
        processors: Sequence[Processor] = (),
        criteria: Sequence[Criterion] = (),
        noise: Noise | None = None,
        *,
        scores_only: bool = False,
        lockstep: bool = False,
        whole_batch: bool = False,
        stop_together: bool = False,
        temperature: float = 1.0,
        keep_scores: bool = False,
        keep_logits: bool = False,
        pad_token: int = 0,
    ) -> None:
        """Args:
        prompts: as the caller gave them, left padding included.
        noise: None picks greedily.
        scores_only: every processor is a pure function of the scores, so that many nodes may be processed at once.
        lockstep: some processor or criterion looks at the batch as a whole; all rows then advance together and finished
            rows are shown as padding, so that it sees exactly the calls of plain decoding.
        whole_batch: processors hold something per batch row, so they must be called with all rows in place, though they
            treat each row by itself.
        stop_together: no row ends before all rows are done (what plain decoding does without an end-of-sequence token).
        temperature: what the processors divide the scores by; told to drafters, used for nothing else.
        keep_scores, keep_logits: record processed scores and raw logits of every emitted token.
        """
        self.prompts = prompts
        self.processors = tuple(processors)
        self.criteria = tuple(criteria)
        self.noise = noise
        self.scores_only = scores_only or not processors
        self.lockstep = lockstep
        self.temperature = temperature
        self.pad_token = pad_token
        self.emitted: list[list[int]] = [[] for _ in prompts]
        self.done = [False] * len(prompts)
        self.scores: list[list[Tensor]] = [[] for _ in prompts]
        self.logits: list[list[Tensor]] = [[] for _ in prompts]
        self._whole_batch = whole_batch or lockstep
        self._stop_together = stop_together
        self._keep_scores = keep_scores
        self._keep_logits = keep_logits
        self._max_new_tokens: int | None = None
        self._pending: list[list[int]] = [[] for _ in prompts]
        self._pending_done = list(self.done)
        self._ids = torch.cat([prompts, prompts.new_full((len(prompts), 256), pad_token)], dim=1)

    @property
    def greedy(self) -> bool:
        """Whether tokens are picked without noise."""
        return self.noise is None

    @property
    def active_rows(self) -> tuple[int, ...]:
        """Batch rows that still generate."""
        return tuple(row for row, done in enumerate(self.done) if not done)

    def num_generated(self, row: int) -> int:
        """Tokens that the row has emitted, pending ones included: the index of its next token."""
        return len(self.emitted[row]) + len(self._pending[row])

    def choose(self, rows: Sequence[int], logits: Float[Tensor, "n v"]) -> tuple[Int[Tensor, " n"], list[bool]]:
        """Process, pick and make pending one token for each of the batch rows `rows`; also says which rows ended
        with it.

        In lockstep `rows` must be all active rows, at one index.  Synchronises.
        """
        scores = self.processed(rows, logits)
        tokens = torch.empty(len(rows), dtype=torch.long, device=self.prompts.device)
        for index, members in self._by_index(rows).items():
            noise = None if self.noise is None else self.noise.at(index)[[rows[i] for i in members]]
            tokens[members] = pick_tokens(scores[members], noise)
        return tokens, self.push(rows, tokens.tolist())

    def processed(self, rows: Sequence[int], logits: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
        """Processed scores of the next token of each of the batch rows `rows`, recorded as far as wanted; a push must
        follow."""
        scores = logits.to(device=self.prompts.device, dtype=torch.float32, copy=bool(self.processors))
        raw = scores.clone() if self._keep_logits else None
        if self.processors:
            groups = self._by_index(rows)
            parts = [self._process([rows[i] for i in group], index, scores[group]) for index, group in groups.items()]
            order = [i for group in groups.values() for i in group]
            scores = torch.cat(parts)[sorted(range(len(order)), key=order.__getitem__)]
        self.record(rows, scores, raw)
        return scores

    def push(self, rows: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Make one token per row pending and return which rows end with it; for verifiers that pick by themselves."""
        for row, token in zip(rows, tokens, strict=True):
            self._write(row, token)
        if self.criteria:
            for _, members in self._by_index(rows).items():
                self._check_criteria([rows[i] for i in members])
        if self._max_new_tokens is not None:
            for row in rows:
                self._pending_done[row] |= self.num_generated(row) >= self._max_new_tokens
        if self._stop_together and not all(self._pending_done):
            return [False] * len(rows)
        return [self._pending_done[row] for row in rows]

    def process_nodes(self, scores: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
        """Process the scores of any nodes at once; only for `scores_only` processors, which ask for no prefix."""
        prefix = self.prompts[:1].expand(len(scores), -1).to(scores.device)
        for processor in self.processors:
            scores = processor(prefix, scores)
        return scores

    @property
    def keeps_records(self) -> bool:
        """Whether processed scores or raw logits of emitted tokens are wanted."""
        return self._keep_scores or self._keep_logits

    def record(self, rows: Sequence[int], scores: Float[Tensor, "n v"], raw: Float[Tensor, "n v"] | None) -> None:
        """Keep, as far as wanted, the scores and raw logits of tokens about to be pushed; done before `push`, whose
        criteria look at them."""
        for i, row in enumerate(rows):
            if self._keep_scores:
                self.scores[row].append(scores[i].clone())
            if raw is not None and self._keep_logits:
                self.logits[row].append(raw[i])

    def limit(self, max_new_tokens: int) -> None:
        """End every row after so many tokens at the latest, whatever the criteria say."""
        self._max_new_tokens = max_new_tokens

    def settle(self) -> None:
        """The step stands: pending tokens become emitted ones."""
        for row, pending in enumerate(self._pending):
            self.emitted[row] += pending
            self._pending[row] = []
        if not self._stop_together or all(self._pending_done):
            self.done = list(self._pending_done)

    def rollback(self) -> None:
        """The step failed: pending tokens, scores and stops are forgotten."""
        for row in range(len(self._pending)):
            self._pending[row] = []
            del self.scores[row][len(self.emitted[row]) :]
            del self.logits[row][len(self.emitted[row]) :]
        self._pending_done = list(self.done)

    def _by_index(self, rows: Sequence[int]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault(self.num_generated(row), []).append(i)
        return groups

    def _prefix(self, rows: Sequence[int], index: int) -> Int[Tensor, "n t"]:
        return self._ids[list(rows), : self.prompts.shape[1] + index]

    def _process(self, rows: list[int], index: int, scores: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
        if self._whole_batch and len(rows) < len(self._ids):
            full = scores.new_zeros(len(self._ids), scores.shape[1])
            full[rows] = scores
            return self._process_all(range(len(self._ids)), index, full)[rows]
        return self._process_all(rows, index, scores)

    def _process_all(self, rows: Sequence[int], index: int, scores: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
        prefix = self._prefix(rows, index)
        for processor in self.processors:
            scores = processor(prefix, scores)
        return scores

    def _write(self, row: int, token: int) -> None:
        column = self.prompts.shape[1] + self.num_generated(row)
        if column >= self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.full_like(self._ids, self.pad_token)], dim=1)
        self._ids[row, column] = token
        self._pending[row].append(token)

    def _check_criteria(self, rows: list[int]) -> None:
        index = self.num_generated(rows[0])
        asked = list(range(len(self._ids))) if self.lockstep else rows
        prefix = self._prefix(asked, index)
        scores = self._scores_so_far(asked, index) if self._keep_scores else None
        done = torch.zeros(len(asked), dtype=torch.bool, device=prefix.device)
        for criterion in self.criteria:
            done = done | criterion(prefix, scores)
        for row, is_done in zip(asked, done.tolist(), strict=True):
            if row in rows:
                self._pending_done[row] = self._pending_done[row] or is_done

    def _scores_so_far(self, rows: Sequence[int], length: int) -> tuple[Tensor, ...]:
        live = next(row for row in rows if len(self.scores[row]) >= length)
        missing = torch.zeros_like(self.scores[live][0])
        return tuple(
            torch.stack([self.scores[row][i] if i < len(self.scores[row]) else missing for row in rows])
            for i in range(length)
        )
