"""The whole of training a head: text, draft vocabulary, training-time test, held-out τ; each can be taken up again."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.draft.eagle_head import EagleHead
from specdec.errors import ConfigError, TrainingError
from specdec.hf.initial_head import HeadShape, initial_head
from specdec.hf.lockstep import LockstepModel
from specdec.hf.teacher import TeacherModel
from specdec.train.acceptance import Texts, chain_acceptance, tau_along
from specdec.train.chat import ChatPieces, chat_pieces
from specdec.train.data import Corpus, first_replies, load_rounds, round_file, save_round
from specdec.train.eagle import TestTimeTraining
from specdec.train.optimise import HeadOptimiser, OptimiserConfig
from specdec.train.progress import Progress
from specdec.train.selftalk import Pick, SelfTalkConfig, end_of_turn_ids, opening_rows, pick_tokens_torch, talk
from specdec.train.state import RunState, read_state, restore, save_state

WRITING_SHARE = 0.25
"""Part of a time budget that may go into writing text."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    tokens: int = 45_000_000
    """Text to write (tokens)."""
    epochs: float = 4.0
    minutes: float | None = None
    """Wall time for everything; text and steps are cut to fit."""
    rows_at_once: int = 8192
    """Rows that a round of text has."""
    batch_rows: int = 26
    places_share: float = 0.7
    """Part of a batch's tokens that the loss looks at, at most."""
    held_out_rows: int = 104
    seed: int = 0
    compiled: bool = False
    """Fuse the target's layers with torch.compile while training."""
    talk: SelfTalkConfig = field(default_factory=SelfTalkConfig)
    recipe: TestTimeTraining = field(default_factory=TestTimeTraining)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    shape: HeadShape = field(default_factory=HeadShape)
    log_every: int = 50
    look_every: int = 1000
    """Steps between estimates of held-out τ."""
    save_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("tokens", "rows_at_once", "batch_rows", "held_out_rows", "log_every", "look_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}; accepted: at least 1")
        for name in ("epochs", "minutes"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}; accepted: a positive number")
        if not 0 < self.places_share <= 1:
            raise ConfigError(f"places_share={self.places_share!r}; accepted: above 0, at most 1")

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for one run to go on from another."""
        mine = dataclasses.asdict(self)
        for name in ("minutes", "log_every", "save_seconds", "compiled", "rows_at_once"):
            mine.pop(name)
        return {name: _plain(value) for name, value in mine.items()}


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Place:
    """This process among those that train together."""

    device: torch.device
    rank: int = 0
    world: int = 1

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            torch.distributed.barrier()


@final
class TrainingRun:
    """A run in a folder: `write_text`, then `train`; either goes on from what the folder holds."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        config: TrainConfig,
        progress: Progress,
        place: Place,
    ) -> None:
        self.model, self.tokenizer, self.folder, self.config = model, tokenizer, folder, config
        self._progress, self._place, self._began = progress, place, time.monotonic()

    @property
    def text_folder(self) -> Path:
        """Where the rounds of text lie."""
        return self.folder / "text"

    # -- text ---------------------------------------------------------------------------------------------------------

    def write_text(self, prompts: list[list[int]] | None = None) -> None:
        """Let the target write text until there is enough, or the time for it is up; rounds that are there are kept.

        With `prompts` (token ids up to where a reply begins) the target answers those, over and over.
        """
        config, place = self.config, self._place
        if read_state(self.folder) is not None:  # training has begun: another text would bend its curve
            return
        pieces = chat_pieces(self.tokenizer) if prompts is None or self.tokenizer.chat_template else None
        eos = self.model.generation_config.eos_token_id
        eos = self.tokenizer.eos_token_id if eos is None else eos
        ends = end_of_turn_ids(pieces, eos, self.tokenizer.all_special_ids)
        per_round = config.rows_at_once * config.talk.length
        numbers = range(-(-config.tokens // per_round))
        self._progress.phase("Writing text (tokens)", len(numbers) * per_round)
        step = None
        for number in numbers:
            if number % place.world != place.rank or round_file(self.text_folder, number).exists():
                continue
            if number >= place.world and self._spent() > WRITING_SHARE * self._budget():
                self._progress.say(f"time for writing is up after {number * per_round} tokens")
                break
            step = step or LockstepModel(self.model, config.rows_at_once, config.talk.length).step
            self._write_round(number, step, pieces, ends, prompts, per_round)
        del step
        place.wait()

    def _write_round(
        self, number: int, step, pieces: ChatPieces | None, ends: list[int], prompts, per_round: int
    ) -> None:
        config = self.config
        seed = config.seed * 10_007 + number
        if prompts is None:
            assert pieces is not None
            openings = opening_rows(pieces, self.tokenizer, config.rows_at_once, config.talk, seed)
        else:
            first = number * config.rows_at_once
            openings = [prompts[(first + row) % len(prompts)] for row in range(config.rows_at_once)]

        def on_column(column: int) -> None:
            if column % 32 == 0:
                self._progress.advance(number * per_round + column * config.rows_at_once)

        rows = talk(
            step,
            pick_for(self._place.device),
            openings,
            pieces,
            ends,
            config.talk,
            seed,
            self._place.device,
            prompts is not None,
            on_column,
        )
        save_round(self.text_folder, number, rows)
        self._progress.advance((number + 1) * per_round)

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self) -> tuple[EagleHead, RunState, Corpus]:
        """Train until the planned steps are done; returns the head (in the target's dtype), the state, and the text."""
        config, place = self.config, self._place
        corpus = Corpus.of(load_rounds(self.text_folder, place.device), config.held_out_rows)
        head = initial_head(self.model, config.shape, config.seed)
        if head.config.reduced:
            head.set_vocabulary(draft_vocabulary(corpus, head))
        if head.lm_head is not None:
            _copy_lm_head(head, self.model)
        teacher = TeacherModel(self.model, head.config.taps, config.talk.length, config.compiled)
        optimiser = HeadOptimiser(head, teacher, config.recipe, config.optimiser, self.model.dtype, place.world)
        state = read_state(self.folder)
        place.wait()  # the first process is about to write it
        if state is None:
            state = RunState(config.fingerprint(), self._plan(corpus, optimiser))
            if place.rank == 0:
                save_state(self.folder, state, optimiser)
            place.wait()
        else:
            restore(self.folder, state, config.fingerprint(), optimiser)
            self._progress.say(f"going on from step {state.step} of {state.total_steps}")
        self._loop(corpus, optimiser, teacher, state)
        return optimiser.working, state, corpus

    def _plan(self, corpus: Corpus, optimiser: HeadOptimiser) -> int:
        """Steps to train: the epochs asked for, or what the time left allows, as measured."""
        config, place = self.config, self._place
        steps = math.ceil(corpus.batches_per_epoch(config.batch_rows, place.world) * config.epochs)
        if config.minutes is None:
            return max(steps, 1)
        batch = next(corpus.batches(config.batch_rows, self._places(), config.seed, 0, place.rank, place.world))
        seconds = optimiser.measure(batch)
        allowed = int((self._budget() - self._spent()) / seconds * 0.97)
        if place.world > 1:
            agreed = torch.tensor(allowed, device=place.device)
            torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN)
            allowed = int(agreed)
        self._progress.say(f"{seconds * 1e3:.2f} ms a step; {steps} steps wanted, time for {allowed}")
        return max(min(steps, allowed), 1)

    def _loop(self, corpus: Corpus, optimiser: HeadOptimiser, teacher: TeacherModel, state: RunState) -> None:
        config, place = self.config, self._place
        batches = corpus.batches(config.batch_rows, self._places(), config.seed, state.step, place.rank, place.world)
        self._progress.phase("Training (steps)", state.total_steps, state.step)
        began, saved, before = time.monotonic(), time.monotonic(), state.seconds
        sums, since = torch.zeros(config.recipe.steps, 2, device=place.device), 0
        while state.step < state.total_steps:
            sums += optimiser.step(next(batches), state.step / state.total_steps)
            state.step, since = state.step + 1, since + 1
            last = state.step == state.total_steps
            if state.step % config.log_every == 0 or last:
                state.seconds = before + time.monotonic() - began
                state.history.append(self._entry(state, sums / since))
                sums, since = torch.zeros_like(sums), 0
                self._progress.advance(state.step, _note(state.history[-1]))
            if state.step % config.look_every == 0 or last:
                state.history[-1]["tau"] = self.held_out_tau(optimiser.working, teacher, corpus)
                self._progress.say(f"step {state.step}: held-out tau (chain of 5) {state.history[-1]['tau']:.3f}")
            # A state is saved only where figures were just logged, so that a resumed curve has no seam.
            if since == 0 and place.rank == 0 and (last or time.monotonic() - saved > config.save_seconds):
                save_state(self.folder, state, optimiser)
                saved = time.monotonic()

    def held_out_tau(self, head: EagleHead, teacher: TeacherModel, corpus: Corpus, depth: int = 5) -> float:
        """τ of greedy chains along the first replies of the held-out rows."""
        emitted = steps = 0.0
        for texts in held_out_texts(corpus, teacher, self.config.batch_rows):
            tau = tau_along(chain_acceptance(head, texts, depth), texts, depth)
            emitted, steps = emitted + tau.tau * tau.steps, steps + tau.steps
        return emitted / max(steps, 1)

    def _entry(self, state: RunState, means: torch.Tensor) -> dict[str, Any]:
        figures = means.tolist()
        if not all(math.isfinite(loss) for loss, _ in figures):
            raise TrainingError(
                f"the loss is {figures[0][0]} at step {state.step}: training went astray; lower the learning rate "
                f"(now {self.config.optimiser.learning_rate}) and start anew in another --out; what "
                f"{self.folder} holds is from before"
            )
        tokens = state.step * self.config.batch_rows * self.config.talk.length * self._place.world
        losses, agreements = ([round(x[i], 5) for x in figures] for i in range(2))
        return {"step": state.step, "tokens": tokens, "loss": losses, "agreement": agreements}

    def _places(self) -> int:
        return max(1, int(self.config.batch_rows * self.config.talk.length * self.config.places_share))

    def _budget(self) -> float:
        return math.inf if self.config.minutes is None else self.config.minutes * 60

    def _spent(self) -> float:
        return time.monotonic() - self._began


def held_out_texts(corpus: Corpus, teacher: TeacherModel, batch_rows: int):
    """First replies of held-out rows with the target's features, in batches of the training shape."""
    rows = corpus.held_out
    start, end = first_replies(rows)
    for first in range(0, len(rows.tokens) - batch_rows + 1, batch_rows):
        part = slice(first, first + batch_rows)
        tokens = rows.tokens[part].long()
        taps, _ = teacher(tokens)
        yield Texts(tokens, taps, start[part], end[part])


def draft_vocabulary(corpus: Corpus, head: EagleHead) -> torch.Tensor:
    """The tokens seen most in replies, in order of id.  Raises `TrainingError` where they cover too little text."""
    counts = corpus.frequencies(head.config.vocab_size)
    wanted, seen = head.config.num_draft_tokens, int((counts > 0).sum())
    chosen = counts.argsort(descending=True, stable=True)[:wanted]
    share = float(counts[chosen].sum() / counts.sum())
    if share < 0.8:
        raise TrainingError(
            f"a draft vocabulary of {wanted} tokens covers {share:.0%} of the replies' tokens ({seen} different ones); "
            "accepted: at least 80%; give a larger --draft-vocab, or 0 for all"
        )
    return chosen.sort().values


def _copy_lm_head(head: EagleHead, model: PreTrainedModel) -> None:
    weight = model.get_output_embeddings().weight
    assert head.lm_head is not None
    with torch.no_grad():
        head.lm_head.weight.copy_(weight[head.target_ids.to(weight.device)])


def pick_for(device: torch.device) -> Pick:
    """How tokens are picked on a device."""
    if device.type != "cuda":
        return pick_tokens_torch
    from specdec.kernels.sample_rows import sample_rows  # triton exists only beside CUDA

    return sample_rows


def _note(entry: dict[str, Any]) -> str:
    losses = " ".join(f"{x:.3f}" for x in entry["loss"])
    return f"loss {losses} agreement {' '.join(f'{x:.3f}' for x in entry['agreement'])}"
