"""The target talks to itself: it writes user turns behind the chat template's user prefix, and replies to them.

Every row of a round stands at the same position; text that the template puts between turns is forced, the rest sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.errors import ConfigError
from specdec.train.chat import OPENERS, SYSTEM_PROMPTS, ChatPieces, ChatTokenizer

FORCED, USER, REPLY = 0, 1, 2
"""What a column of a row holds: text of the template or a prompt, a user turn, a reply."""

Step = Callable[[Int[Tensor, " b"], int], Float[Tensor, "b v"]]
"""Logits behind the tokens at a position; `LockstepModel.step`."""
Pick = Callable[[Float[Tensor, "b v"], Float[Tensor, " b"], float, Int[Tensor, ""]], Int[Tensor, " b"]]
"""One token per row from logits, temperatures (0: greedy), log min-p, and a seed."""


@dataclass(frozen=True)
class SelfTalkConfig:
    """How the rows of a round are written."""

    length: int = 320
    """Columns of a row."""
    user_temperature: float = 1.0
    reply_temperature: float = 0.8
    greedy_share: float = 0.6
    """Rows whose replies are greedy."""
    min_p: float = 0.03
    """Tokens less likely than this times the likeliest are never sampled."""
    seeded_share: float = 0.5
    """Rows whose first user turn begins with given words."""
    system_share: float = 0.12
    """Rows with one of our system prompts."""
    max_user_tokens: int = 120
    max_reply_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("greedy_share", "seeded_share", "system_share", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}; accepted: 0 to 1")
        for name in ("user_temperature", "reply_temperature"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}; accepted: a positive number")
        for name in ("length", "max_user_tokens", "max_reply_tokens"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name}={getattr(self, name)!r}; accepted: at least 2")


@dataclass(frozen=True)
class Rows:
    """Finished text: tokens, and what each column holds."""

    tokens: Int[Tensor, "b t"]
    roles: Int[Tensor, "b t"]
    greedy: Bool[Tensor, " b"]
    """Rows whose replies are greedy."""

    @property
    def chosen_next(self) -> Bool[Tensor, "b t"]:
        """Columns whose successor the target chose in a reply that has not begun to loop: what to learn from."""
        replied = (self.roles == REPLY) & ~looping(self.tokens)
        return torch.cat([replied[:, 1:], torch.zeros_like(replied[:, :1])], dim=1)


def opening_rows(
    pieces: ChatPieces, tokenizer: ChatTokenizer, rows: int, config: SelfTalkConfig, seed: int
) -> list[list[int]]:
    """What each row of a round begins with: system prompt, user prefix, and perhaps first words of the user."""
    chance = torch.Generator().manual_seed(seed)
    openers = [tokenizer.encode(words, add_special_tokens=False) for words in OPENERS]
    systems = [tokenizer.encode(text, add_special_tokens=False) for text in SYSTEM_PROMPTS]
    draws = torch.rand(rows, 2, generator=chance).tolist()
    picks = torch.randint(1 << 30, (rows, 2), generator=chance).tolist()
    around = pieces.opening_around_system
    result = []
    for (for_system, for_words), (which_system, which_words) in zip(draws, picks, strict=True):
        row = list(pieces.opening)
        if around is not None and for_system < config.system_share:
            row = [*around[0], *systems[which_system % len(systems)], *around[1]]
        if for_words < config.seeded_share:
            row += openers[which_words % len(openers)]
        result.append(row)
    return result


def talk(
    step: Step,
    pick: Pick,
    openings: Sequence[Sequence[int]],
    pieces: ChatPieces | None,
    end_ids: Sequence[int],
    config: SelfTalkConfig,
    seed: int,
    device: torch.device,
    starts_with_reply: bool = False,
    on_column: Callable[[int], None] = lambda column: None,
) -> Rows:
    """Write one round of rows, `config.length` tokens each.  Without `pieces` a row is padded behind its first reply.

    Args:
        openings: what each row begins with; cut to leave room for at least one token.
        starts_with_reply: the openings end where a reply begins (given prompts) rather than inside a user turn.
    """
    state = _RoundState.begin(openings, pieces, end_ids, config, seed, device, starts_with_reply)
    log_min_p = float(torch.tensor(max(config.min_p, 1e-30)).log())
    with torch.no_grad():
        for column in range(config.length - 1):
            logits = step(state.tokens[:, column], column)
            state.take(column + 1, pick(logits, state.temperatures(), log_min_p, state.seed_of(column)))
            on_column(column + 1)
    tokens, roles = (x[:, : config.length].contiguous() for x in (state.tokens, state.roles))
    return Rows(tokens.to(torch.int32), roles, state.reply_temperature == 0)


@dataclass
class _RoundState:
    """A round while it is written; everything stays on the device, so that nothing waits for the host."""

    tokens: Int[Tensor, "b t"]
    """-1 where nothing is forced yet; a few columns wider than the rows."""
    roles: Int[Tensor, "b t"]
    speaking: Int[Tensor, " b"]
    spoken: Int[Tensor, " b"]
    reply_temperature: Float[Tensor, " b"]
    user_temperature: float
    limits: Int[Tensor, " roles"]
    end_ids: Int[Tensor, " n"]
    bridges: Int[Tensor, "roles l"]
    """What is forced behind a turn of each role, -1 padded."""
    seed: Int[Tensor, ""]

    @staticmethod
    def begin(
        openings, pieces, end_ids, config: SelfTalkConfig, seed: int, device, starts_with_reply: bool
    ) -> _RoundState:
        bridges = _bridges(pieces, end_ids, config.length)
        tokens = torch.full((len(openings), config.length + bridges.shape[1] + 2), -1, dtype=torch.long)
        for row, opening in enumerate(openings):
            kept = torch.tensor(list(opening)[-(config.length - 1) :])
            tokens[row, : len(kept)] = kept
        chance = torch.Generator().manual_seed(seed)
        greedy = torch.rand(len(openings), generator=chance) < config.greedy_share
        temperature = torch.where(greedy, 0.0, config.reply_temperature)
        first = REPLY if starts_with_reply else USER
        rows = len(openings)
        return _RoundState(
            tokens=tokens.to(device),
            roles=torch.zeros(tokens.shape, dtype=torch.uint8, device=device),
            speaking=torch.full((rows,), first, device=device),
            spoken=torch.zeros(rows, dtype=torch.long, device=device),
            reply_temperature=temperature.to(device),
            user_temperature=config.user_temperature,
            limits=torch.tensor([0, config.max_user_tokens, config.max_reply_tokens], device=device),
            end_ids=torch.tensor(list(end_ids), device=device),
            bridges=bridges.to(device),
            seed=torch.tensor(seed * 100_003 % (1 << 30), device=device),
        )

    def temperatures(self) -> Float[Tensor, " b"]:
        return torch.where(self.speaking == USER, self.user_temperature, self.reply_temperature)

    def seed_of(self, column: int) -> Int[Tensor, ""]:
        return self.seed + column

    def take(self, column: int, sampled: Int[Tensor, " b"]) -> None:
        """Fill a column with what is forced or else sampled, and force the bridge behind turns that ended with it."""
        forced = self.tokens[:, column]
        free = forced < 0
        chosen = torch.where(free, sampled, forced)
        self.tokens[:, column] = chosen
        self.roles[:, column] = torch.where(free, self.speaking, FORCED).to(torch.uint8)
        self.spoken += free
        said_end = torch.isin(chosen, self.end_ids)
        ended = free & (said_end | (self.spoken >= self.limits[self.speaking]))
        self._force_bridge(column + 1, ended, chosen)
        self.speaking = torch.where(ended, USER + REPLY - self.speaking, self.speaking)
        self.spoken = torch.where(ended, 0, self.spoken)

    def _force_bridge(self, column: int, ended: Bool[Tensor, " b"], chosen: Int[Tensor, " b"]) -> None:
        bridge = self.bridges[self.speaking]
        # A bridge begins with the end-of-turn token; a turn that said it must not say it twice.
        said = torch.cat([bridge[:, 1:], torch.full_like(bridge[:, :1], -1)], dim=1)
        bridge = torch.where((chosen == bridge[:, 0])[:, None], said, bridge)
        width = min(bridge.shape[1], self.tokens.shape[1] - column)
        ahead = self.tokens[:, column : column + width]
        bridge = bridge[:, :width]
        self.tokens[:, column : column + width] = torch.where(ended[:, None] & (bridge >= 0), bridge, ahead)


def _bridges(pieces: ChatPieces | None, end_ids: Sequence[int], length: int) -> Int[Tensor, "3 l"]:
    """Forced text behind turns of each role; the end token comes first."""
    if pieces is None:  # nothing follows a reply: the rest of the row is end tokens, which count as forced
        return torch.full((3, length), end_ids[0])
    behind = {}
    for role, piece in ((USER, pieces.after_user), (REPLY, pieces.after_reply)):
        behind[role] = list(piece) if piece and piece[0] in end_ids else [end_ids[0], *piece]
    width = max(map(len, behind.values()))
    table = torch.full((3, width), -1)
    for role, ids in behind.items():
        table[role, : len(ids)] = torch.tensor(ids)
    return table


def pick_tokens_torch(
    logits: Float[Tensor, "b v"], temperature: Float[Tensor, " b"], log_min_p: float, seed: Int[Tensor, ""]
) -> Int[Tensor, " b"]:
    """`Pick` in plain torch, for machines without CUDA."""
    chance = torch.Generator(logits.device).manual_seed(int(seed))
    scores = logits.float()
    greedy = scores.argmax(-1)
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature.clamp(min=1e-6)[:, None]
    scores = scores.masked_fill(scores < log_min_p, float("-inf"))
    noise = torch.empty_like(scores).exponential_(1, generator=chance)
    return torch.where(temperature > 0, (scores - noise.log()).argmax(-1), greedy)


def end_of_turn_ids(
    pieces: ChatPieces | None, eos: int | Sequence[int] | None, special_ids: Sequence[int]
) -> list[int]:
    """Tokens that end a turn: end-of-sequence tokens, and special tokens that the template puts right behind a turn."""
    found = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if pieces is not None:
        found += [piece[0] for piece in (pieces.after_reply, pieces.after_user) if piece and piece[0] in special_ids]
    if not found:
        raise ConfigError("the model has no end-of-sequence token; set generation_config.eos_token_id")
    return list(dict.fromkeys(found))


def looping(tokens: Int[Tensor, "b t"], longest_period: int = 32, repeats: int = 3) -> Bool[Tensor, "b t"]:
    """Columns that continue a loop: the text behind `repeats` whole turns of it (and at least 32 tokens)."""
    rows, length = tokens.shape
    result = torch.zeros(rows, length, dtype=torch.bool, device=tokens.device)
    steps = torch.arange(length, device=tokens.device)
    for period in range(1, min(longest_period, length - 1) + 1):
        same = torch.zeros(rows, length, dtype=torch.bool, device=tokens.device)
        same[:, period:] = tokens[:, period:] == tokens[:, :-period]
        last_break = torch.where(same, -1, steps).cummax(1).values
        result |= steps - last_break >= max(32, (repeats - 1) * period)
    return result
