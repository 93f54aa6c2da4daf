"""Rows of self-generated text on disk: one safetensors file a round, each whole or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.errors import ConfigError
from specdec.train.eagle import Batch
from specdec.train.files import put_whole
from specdec.train.selftalk import REPLY, Rows


def round_file(folder: Path, number: int) -> Path:
    """Where a round of rows lies."""
    return folder / f"round-{number:05d}.safetensors"


def save_round(folder: Path, number: int, rows: Rows) -> None:
    """Keep a round."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"tokens": rows.tokens.cpu(), "roles": rows.roles.cpu(), "greedy": rows.greedy.cpu()}
    put_whole(round_file(folder, number), lambda path: save_file(tensors, path))


def load_rounds(folder: Path, device: torch.device) -> Rows:
    """All rounds that are there, in order of number.  Raises `ConfigError` where there are none."""
    files = sorted(folder.glob("round-*.safetensors"))
    if not files:
        raise ConfigError(f"no training text in {folder}; run the generation first")
    parts = [load_file(file) for file in files]
    tokens, roles, greedy = (
        torch.cat([part[name] for part in parts]).to(device) for name in ("tokens", "roles", "greedy")
    )
    return Rows(tokens, roles, greedy)


@dataclass(frozen=True)
class Corpus:
    """Text to learn from, and some kept apart."""

    tokens: Int[Tensor, "n t"]
    chosen_next: Bool[Tensor, "n t"]
    held_out: Rows

    @staticmethod
    def of(rows: Rows, held_out: int) -> Corpus:
        """Keep apart the first `held_out` greedy rows; looping text is left out, part by part to spare memory."""
        apart = torch.zeros(len(rows.tokens), dtype=torch.bool, device=rows.tokens.device)
        greedy = rows.greedy.nonzero().flatten()[:held_out]
        apart[greedy] = True
        kept = Rows(rows.tokens[~apart], rows.roles[~apart], rows.greedy[~apart])
        parts = [
            Rows(*part).chosen_next
            for part in zip(*(x.split(8192) for x in (kept.tokens, kept.roles, kept.greedy)), strict=True)
        ]
        if not parts or not any(bool(part.any()) for part in parts):
            raise ConfigError("the training text holds no reply to learn from; generate more, or longer rows")
        apart_rows = Rows(rows.tokens[apart], rows.roles[apart], rows.greedy[apart])
        return Corpus(kept.tokens, torch.cat(parts), apart_rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows to learn from."""
        return self.tokens.numel()

    def batches_per_epoch(self, rows: int, world: int = 1) -> int:
        """Whole batches that one pass gives to each process."""
        return len(self.tokens) // (rows * world)

    def batches(self, rows: int, places: int, seed: int, first: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Batches from number `first` on, for ever; which rows a batch holds depends on seed and number alone."""
        per_epoch = self.batches_per_epoch(rows, world)
        if per_epoch == 0:
            raise ConfigError(f"{len(self.tokens)} rows of text; accepted: at least {rows * world}, one batch")
        order, of_epoch = None, -1
        while True:
            epoch, index = divmod(first, per_epoch)
            if epoch != of_epoch or order is None:
                chance = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
                order, of_epoch = torch.randperm(len(self.tokens), generator=chance).to(self.tokens.device), epoch
            begin = (index * world + rank) * rows
            yield self._batch(order[begin : begin + rows], places, seed * 7_000_003 + first * world + rank)
            first += 1

    def _batch(self, rows: Int[Tensor, " b"], places: int, seed: int) -> Batch:
        chance = torch.Generator(self.tokens.device).manual_seed(seed)
        chosen = self.chosen_next[rows].flatten()
        draws = torch.rand(chosen.shape, generator=chance, device=chosen.device)
        order = (chosen + draws).topk(min(places, len(chosen))).indices
        return Batch(self.tokens[rows].long(), order, chosen[order].float())

    def frequencies(self, vocab_size: int) -> Float[Tensor, " v"]:
        """How often each token was chosen in a reply."""
        following = torch.roll(self.tokens, -1, dims=1)[self.chosen_next].long()
        return torch.bincount(following, minlength=vocab_size).float()


def first_replies(rows: Rows) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Where the first reply of each row starts and ends (its end-of-turn token included)."""
    columns = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    replied = rows.roles == REPLY
    length = rows.tokens.shape[1]
    start = torch.where(replied, columns, length).amin(1)
    end = torch.where(~replied & (columns > start[:, None]), columns, length).amin(1)
    return start, end


def free_bytes(folder: Path) -> int:
    """Room left on the disk of a folder that may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
