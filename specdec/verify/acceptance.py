"""How many drafts of each request survive, for a ragged batch of chains whose target tokens are already sampled.

`accept_chains` raises on bad input; `acceptance` is the same for a serving loop, which must go on: it logs and accepts
nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.errors import ConfigError

logger = logging.getLogger(__name__)

INTEGERS = (torch.int32, torch.int64)

Counts = Sequence[int] | Int[Tensor, " b"]


@dataclass(frozen=True)
class Acceptance:
    """Which drafts of a ragged batch are accepted."""

    counts: Int[Tensor, " b"]
    """Accepted drafts of each request."""
    mask: Bool[Tensor, " n"]
    """Whether each of the flat drafts is accepted; the drafts of a request keep their places."""


def acceptance(
    draft_tokens: Int[Tensor, " n"],
    num_draft_tokens: Counts,
    sampled_token_ids: Int[Tensor, "b s"],
    return_mask: bool = False,
) -> tuple[Int[Tensor, " b"], Bool[Tensor, " n"] | None]:
    """`(counts, mask)` as `accept_chains` has them; input that contradicts itself is logged and accepts nothing."""
    try:
        result = accept_chains(draft_tokens, num_draft_tokens, sampled_token_ids)
    except ConfigError as error:
        logger.error("no draft is accepted: %s", error)
        result = _nothing_accepted(draft_tokens, num_draft_tokens)
    return result.counts, result.mask if return_mask else None


def accept_chains(
    draft_tokens: Int[Tensor, " n"], num_draft_tokens: Counts, sampled_token_ids: Int[Tensor, "b s"]
) -> Acceptance:
    """Accept, of each request, the drafts before the first that differs from the token sampled at its place.

    Args:
        draft_tokens: the drafts of all requests, one behind the other.
        num_draft_tokens: drafts of each request; 0 is allowed.  A tensor on an accelerator is read, which synchronises.
        sampled_token_ids: one row per request; column `i` is what the target sampled behind its first `i` drafts.  A
            negative token is no sample, and where a request has more drafts than there are columns the rest are
            rejected, with one warning.

    Raises `ConfigError` for wrong ranks and types, and for counts that do not fit the drafts or the rows.
    """
    lengths = _checked_lengths(draft_tokens, num_draft_tokens, sampled_token_ids)
    device = sampled_token_ids.device
    total, num_columns = draft_tokens.shape[0], sampled_token_ids.shape[1]
    longest = max(lengths, default=0)
    if longest > num_columns:
        warnings.warn(
            f"num_draft_tokens holds {longest}, sampled_token_ids has {num_columns} columns: drafts without a sample "
            "are rejected",
            stacklevel=2,
        )
    width = min(longest, num_columns)
    sizes = torch.tensor(lengths, dtype=torch.long, device=device)
    starts = sizes.cumsum(0) - sizes
    if width == 0:
        return Acceptance(torch.zeros_like(sizes), torch.zeros(total, dtype=torch.bool, device=device))
    places = starts[:, None] + torch.arange(width, device=device)
    drafts = draft_tokens.to(device)[places.clamp(max=total - 1)]
    counts = count_accepted(drafts, sizes, sampled_token_ids[:, :width])
    offsets = torch.arange(total, device=device) - torch.repeat_interleave(starts, sizes, output_size=total)
    return Acceptance(counts, offsets < torch.repeat_interleave(counts, sizes, output_size=total))


def count_accepted(
    drafts: Int[Tensor, "b n"], lengths: Int[Tensor, " b"], sampled: Int[Tensor, "b n"]
) -> Int[Tensor, " b"]:
    """Leading drafts of each row that equal the sampled tokens; reads nothing on the host, so it can be captured."""
    exists = torch.arange(drafts.shape[1], device=drafts.device) < lengths[:, None]
    matches = (drafts == sampled) & exists & (sampled >= 0)
    return matches.cumprod(1).sum(1)


def _checked_lengths(draft_tokens: Tensor, num_draft_tokens: Counts, sampled_token_ids: Tensor) -> list[int]:
    for name, value, rank in (("draft_tokens", draft_tokens, 1), ("sampled_token_ids", sampled_token_ids, 2)):
        if not isinstance(value, Tensor) or value.dim() != rank or value.dtype not in INTEGERS:
            raise ConfigError(f"{name} is {_described(value)}; accepted: an int32 or int64 tensor of rank {rank}")
    lengths = _host_lengths(num_draft_tokens)
    if len(lengths) != sampled_token_ids.shape[0]:
        raise ConfigError(
            f"num_draft_tokens names {len(lengths)} requests, sampled_token_ids has {sampled_token_ids.shape[0]} rows; "
            "accepted: one of each per request"
        )
    if min(lengths, default=0) < 0:
        raise ConfigError(f"num_draft_tokens holds {min(lengths)}; accepted: 0 and more")
    if sum(lengths) != draft_tokens.shape[0]:
        raise ConfigError(
            f"num_draft_tokens adds up to {sum(lengths)}; accepted: the {draft_tokens.shape[0]} of draft_tokens"
        )
    return lengths


def _host_lengths(num_draft_tokens: Counts) -> list[int]:
    if isinstance(num_draft_tokens, Tensor):
        if num_draft_tokens.dim() != 1 or num_draft_tokens.dtype not in INTEGERS:
            found = _described(num_draft_tokens)
            raise ConfigError(f"num_draft_tokens is {found}; accepted: integers, one per request")
        return num_draft_tokens.tolist()
    lengths = list(num_draft_tokens)
    for length in lengths:
        if not isinstance(length, int) or isinstance(length, bool):
            raise ConfigError(f"num_draft_tokens holds {length!r}; accepted: integers, one per request")
    return lengths


def _nothing_accepted(draft_tokens: object, num_draft_tokens: object) -> Acceptance:
    num_drafts = draft_tokens.numel() if isinstance(draft_tokens, Tensor) else 0
    num_requests = len(num_draft_tokens) if isinstance(num_draft_tokens, Sequence) else 0
    if isinstance(num_draft_tokens, Tensor):
        num_requests = num_draft_tokens.numel()
    device = draft_tokens.device if isinstance(draft_tokens, Tensor) else torch.device("cpu")
    counts = torch.zeros(num_requests, dtype=torch.long, device=device)
    return Acceptance(counts, torch.zeros(num_drafts, dtype=torch.bool, device=device))


def _described(value: object) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
