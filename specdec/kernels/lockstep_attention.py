"""Decode attention for rows that all stand at the same position: one query per row over a contiguous K/V cache.

The number of keys is read on the device, so one CUDA graph serves every position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor


@triton.jit
def _attend_one_query(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    num_keys_ptr,
    scale,
    capacity,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)  # row · KV_HEADS + KV head
    num_keys = tl.load(num_keys_ptr)
    group = tl.arange(0, GROUP_PADDED)
    column = tl.arange(0, SIZE)
    query_at = (pair * GROUP + group[:, None]) * SIZE + column[None, :]
    q = tl.load(q_ptr + query_at, mask=group[:, None] < GROUP, other=0.0)
    top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    mixed = tl.zeros([GROUP_PADDED, SIZE], tl.float32)
    for start in range(0, num_keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        exists = key < num_keys
        key_at = (pair * capacity + key[:, None]) * SIZE + column[None, :]
        k = tl.load(k_ptr + key_at, mask=exists[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(exists[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - new_top[:, None])
        keep = tl.exp(top - new_top)
        v = tl.load(v_ptr + key_at, mask=exists[:, None], other=0.0)
        mixed = mixed * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * keep + tl.sum(weights, 1)
        top = new_top
    mixed = mixed / total[:, None]
    tl.store(out_ptr + query_at, mixed.to(out_ptr.dtype.element_ty), mask=group[:, None] < GROUP)


def attend_lockstep(
    query: Float[Tensor, "b heads d"],
    keys: Float[Tensor, "b h capacity d"],
    values: Float[Tensor, "b h capacity d"],
    num_keys: Int[Tensor, ""],
    scale: float,
) -> Float[Tensor, "b heads d"]:
    """Softmax attention of one query per row over the first `num_keys` keys; `d` is a power of two, at least 16."""
    rows, heads, size = query.shape
    kv_heads, capacity = keys.shape[1:3]
    query = query.contiguous()
    out = torch.empty_like(query)
    group = heads // kv_heads
    _attend_one_query[(rows * kv_heads,)](
        query,
        keys,
        values,
        out,
        num_keys,
        scale,
        capacity,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        SIZE=size,
        BLOCK=64,
        num_warps=4,
        num_stages=2,
    )
    return out
