"""The contract of `reference.attend`, faster: no copy of a long contiguous prefix, SDPA for everything else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.attention.reference import AttentionRules, attend, read_prefix, visible
from specdec.types import KVView, Window, decode_rows, select_scales

LONGEST_COPY = 256
"""Prefix tokens up to which copying them behind each other costs less than a second attention call and a merge."""


def attend_paged(
    query: Float[Tensor, "b heads w dk"], view: KVView, window: Window, rules: AttentionRules
) -> Float[Tensor, "b w heads dv"]:
    """Attention of the window's nodes over committed tokens and their own ancestors."""
    if rules.softcap is not None or rules.sinks is not None:
        return attend(query, view, window, rules)
    if window.is_chain and not any(view.prefix.host_lengths) and _whole(window, rules):
        return _attend_prompt(query, view, rules)
    if len(window.rows) == 1 and view.prefix.spans is not None and query.device.type == "cpu":
        return _attend_span(query, view, window, rules)
    return _attend_gathered(query, view, window, rules)


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


def _attend_span(
    query: Float[Tensor, "1 heads w dk"], view: KVView, window: Window, rules: AttentionRules
) -> Float[Tensor, "1 w heads dv"]:
    """One row whose prefix is one span of slots, seen as a strided tensor.

    The query heads of a KV head are further rows of one matrix product (`[1 h g·w dk]`): K and V are never repeated.
    """
    [start], [length] = view.prefix.spans or (0,), view.prefix.host_lengths
    low = 0 if rules.sliding_window is None else max(0, length - rules.sliding_window + 1)
    k_span = _span(view.k_pages, view.k_scales, start + low, length - low, query.dtype)
    v_span = _span(view.v_pages, view.v_scales, start + low, length - low, query.dtype)
    k, v = view.k.transpose(1, 2), view.v.transpose(1, 2)
    heads, width, kv_heads = query.shape[1], query.shape[2], k.shape[1]
    packed = query.reshape(1, kv_heads, -1, query.shape[3])
    needs_mask = width > 1 or rules.sliding_window is not None
    mask = _packed_mask(view, window, rules.sliding_window, low, heads // kv_heads) if needs_mask else None
    if length > LONGEST_COPY and rules.sliding_window is None and k.shape[3] == v.shape[3]:
        within = None if mask is None else mask[..., length:]
        output = _merge(_flash(packed, k_span, v_span, None, rules), _flash(packed, k, v, within, rules))
    else:
        k, v = torch.cat([k_span, k], dim=2), torch.cat([v_span, v], dim=2)
        output = F.scaled_dot_product_attention(packed, k, v, mask, scale=rules.scaling)
    return output.reshape(1, heads, width, -1).transpose(1, 2)


def _span(pages: Tensor, scales: Tensor | None, start: int, count: int, dtype: torch.dtype) -> Float[Tensor, "1 h t d"]:
    """Consecutive slots of a layer: a strided view of rows stored as they are, a decoded copy of quantised ones."""
    if scales is not None:
        span = slice(start, start + count)
        return decode_rows(pages.flatten(0, 1)[span], select_scales(scales, span), dtype).transpose(0, 1)[None]
    _, _, heads, size = pages.shape
    offset = pages.storage_offset() + start * heads * size
    return pages.as_strided((1, heads, count, size), (0, size, heads * size, 1), offset)


def _flash(
    query: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rules: AttentionRules
) -> tuple[Float[Tensor, "1 h q d"], Float[Tensor, "1 h q"]]:
    """Attention and the log of its softmax's denominator, from the kernel behind SDPA on a CPU."""
    bias = None if mask is None else torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, k, v, attn_mask=bias, scale=rules.scaling)


def _merge(prefix: tuple[Tensor, Tensor], window: tuple[Tensor, Tensor]) -> Float[Tensor, "1 h q d"]:
    """One softmax over two parts, in fp32: each weighs as much as its share of the denominator."""
    (prefix_out, prefix_log), (window_out, window_log) = prefix, window
    share = torch.sigmoid(prefix_log - window_log)[..., None]
    return torch.lerp(window_out.to(share.dtype), prefix_out.to(share.dtype), share).to(prefix_out.dtype)


def _shared_mask(view: KVView, window: Window, sliding_window: int | None) -> Bool[Tensor, "b w s"]:
    """`visible`, built once per window for all layers with the same sliding window and device."""
    key = (sliding_window, view.k.device)
    if key not in window.masks:
        window.masks[key] = visible(view, window, sliding_window)
    return window.masks[key]


def _packed_mask(
    view: KVView, window: Window, sliding_window: int | None, low: int, groups: int
) -> Bool[Tensor, "1 1 q s"]:
    """The mask from prefix token `low` on, once for each query head of a group; built once per window."""
    key = ("packed", sliding_window, groups)
    if key not in window.masks:
        mask = _shared_mask(view, window, sliding_window)[:, None, :, low:]
        window.masks[key] = mask.repeat(1, 1, groups, 1)
    return window.masks[key]
