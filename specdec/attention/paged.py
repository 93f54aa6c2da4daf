"""The contract of `reference.attend`, faster: no copy of the prefix where a row's pages lie contiguously, SDPA for
prompts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.attention.reference import AttentionRules, attend, read_prefix, visible
from specdec.types import KVView, Window, decode_rows, select_scales


def attend_paged(
    query: Float[Tensor, "b heads w dk"], view: KVView, window: Window, rules: AttentionRules
) -> Float[Tensor, "b w heads dv"]:
    """Attention of the window's nodes over committed tokens and their own ancestors."""
    plain = rules.softcap is None and rules.sinks is None
    if plain and window.is_chain and not any(view.prefix.host_lengths) and _whole(window, rules):
        return _attend_prompt(query, view, rules)
    if plain and len(window.rows) == 1 and view.prefix.spans is not None and query.device.type == "cpu":
        return _attend_in_place(query, view, window, rules)
    if plain:
        return _attend_gathered(query, view, window, rules)
    return attend(query, view, window, rules)


def _whole(window: Window, rules: AttentionRules) -> bool:
    return rules.sliding_window is None or window.width <= rules.sliding_window


def _attend_prompt(
    query: Float[Tensor, "b heads w dk"], view: KVView, rules: AttentionRules
) -> Float[Tensor, "b w heads dv"]:
    """Chains over an empty prefix: plain causal attention."""
    k, v = view.k.transpose(1, 2), view.v.transpose(1, 2)
    output = F.scaled_dot_product_attention(
        query, k, v, is_causal=query.shape[2] > 1, scale=rules.scaling, enable_gqa=query.shape[1] != k.shape[1]
    )
    return output.transpose(1, 2)


def _attend_gathered(
    query: Float[Tensor, "b heads w dk"], view: KVView, window: Window, rules: AttentionRules
) -> Float[Tensor, "b w heads dv"]:
    """Any rows: the prefix is copied out of its pages, then one masked call."""
    k = torch.cat([read_prefix(view.k_pages, view, view.k_scales), view.k], dim=1).transpose(1, 2)
    v = torch.cat([read_prefix(view.v_pages, view, view.v_scales), view.v], dim=1).transpose(1, 2)
    mask = _shared_mask(view, window, rules.sliding_window)[:, None]
    is_grouped = query.shape[1] != k.shape[1]
    output = F.scaled_dot_product_attention(query, k, v, mask, scale=rules.scaling, enable_gqa=is_grouped)
    return output.transpose(1, 2)


def _shared_mask(view: KVView, window: Window, sliding_window: int | None) -> Bool[Tensor, "b w s"]:
    """`visible`, built once per window for all layers with the same sliding window and device."""
    key = (sliding_window, view.k.device)
    if key not in window.masks:
        window.masks[key] = visible(view, window, sliding_window)
    return window.masks[key]


def _attend_in_place(
    query: Float[Tensor, "1 heads w dk"], view: KVView, window: Window, rules: AttentionRules
) -> Float[Tensor, "1 w heads dv"]:
    """One row whose prefix is one span of slots: scores against the span and the staged rows, one softmax over both.

    The query heads of a KV head are further rows of one matrix product, so that K and V are never repeated.
    """
    [start], [length] = view.prefix.spans or (0,), view.prefix.host_lengths
    low = 0 if rules.sliding_window is None else max(0, length - rules.sliding_window + 1)
    span = slice(start + low, start + length)
    stored = ((view.k_pages, view.k_scales), (view.v_pages, view.v_scales))
    k_span, v_span = (
        decode_rows(pages.flatten(0, 1)[span], select_scales(scales, span), view.k.dtype).transpose(0, 1)
        for pages, scales in stored
    )
    k, v = view.k[0].transpose(0, 1), view.v[0].transpose(0, 1)
    heads, width, kv_heads = query.shape[1], query.shape[2], k.shape[0]
    q = (query[0] * rules.scaling).reshape(kv_heads, -1, query.shape[3])
    scores = torch.cat([torch.bmm(q, k_span.transpose(1, 2)), torch.bmm(q, k.transpose(1, 2))], dim=2)
    if rules.sliding_window is not None:
        hidden = ~_shared_mask(view, window, rules.sliding_window)[0, :, low:]
        scores.view(kv_heads, -1, width, scores.shape[2]).masked_fill_(hidden, float("-inf"))
    elif width > 1:
        hidden = window.not_ancestors[0].to(scores.device)
        scores.view(kv_heads, -1, width, scores.shape[2])[..., -width:].masked_fill_(hidden, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    split = span.stop - span.start
    output = torch.bmm(weights[..., :split], v_span) + torch.bmm(weights[..., split:], v)
    return output.view(heads, width, -1).transpose(0, 1)[None]
