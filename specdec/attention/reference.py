"""Window attention in plain torch: the committed prefix from the pages, the window from what was staged, one softmax.

This is the readable reference; `paged.py` and the Triton kernel keep the same contract.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.types import KVView, Window, decode_rows, select_scales


@dataclass(frozen=True)
class AttentionRules:
    """What a layer asks of its attention beyond causality."""

    scaling: float
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window - 1` tokens before it; None: all."""
    softcap: float | None = None
    """Scores become `softcap · tanh(score / softcap)`."""
    sinks: Float[Tensor, " heads"] | None = None
    """One more logit per head in the softmax, whose share goes nowhere."""


def attend(
    query: Float[Tensor, "b heads w dk"], view: KVView, window: Window, rules: AttentionRules
) -> Float[Tensor, "b w heads dv"]:
    """Attention of the window's nodes over committed tokens and their own ancestors; softmax in fp32."""
    k = torch.cat([read_prefix(view.k_pages, view, view.k_scales), view.k], dim=1)
    v = torch.cat([read_prefix(view.v_pages, view, view.v_scales), view.v], dim=1)
    groups = query.shape[1] // k.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    k, v = (rows.transpose(1, 2).repeat_interleave(groups, dim=1).to(wide) for rows in (k, v))
    scores = query.to(wide) @ k.transpose(2, 3) * rules.scaling
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    mask = visible(view, window, rules.sliding_window)
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    if rules.sinks is not None:
        sinks = rules.sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).to(query.dtype)


def read_prefix(pages: Tensor, view: KVView, scales: Tensor | None) -> Float[Tensor, "b t h d"]:
    """Committed rows gathered from their pages, padded with zeros to the longest row; uncommitted slots are never
    looked at."""
    longest = max(view.prefix.host_lengths, default=0)
    page_size = pages.shape[1]
    steps = torch.arange(longest, device=pages.device)
    table = view.prefix.page_table.to(pages.device).long()
    slots = table[:, steps // page_size] * page_size + steps % page_size
    committed = steps < view.prefix.lengths.to(pages.device)[:, None]
    slots = slots.masked_fill(~committed, 0)
    rows = decode_rows(pages.flatten(0, 1)[slots], select_scales(scales, slots), view.k.dtype)
    return rows.masked_fill(~committed[..., None, None], 0)


def visible(view: KVView, window: Window, sliding_window: int | None) -> Bool[Tensor, "b w s"]:
    """Which of the prefix tokens and window nodes each node sees; a padding node sees its ancestors, which keeps it
    finite."""
    device = view.k.device
    longest = max(view.prefix.host_lengths, default=0)
    steps = torch.arange(longest, device=device)
    lengths = view.prefix.lengths.to(device)
    positions = window.positions.to(device)
    prefix = (steps < lengths[:, None])[:, None].expand(-1, window.width, -1)
    within = window.ancestors.to(device)
    if sliding_window is not None:
        prefix = prefix & (positions[..., None] - steps < sliding_window)
        within = within & (positions[..., None] - positions[:, None] < sliding_window)
    return torch.cat([prefix, within], dim=-1)
