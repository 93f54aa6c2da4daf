"""Attention of training-time test: step-`j` queries see the step-0 keys before them and their own chain's later keys.

Chain `t` starts at pair `t`; its query at step `j` stands at position `t + j`, attends to the step-0 keys of pairs
`0..t`, and to the keys that chain `t` itself made at steps `1..j` (Li et al. 2025, arXiv:2503.01840).
"""

from __future__ import annotations

from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdec.errors import ConfigError

Heads = Float[Tensor, "b heads t d"]


@final
class ChainMemory:
    """Keys and values of the steps so far; `attend` is what `EagleHead.forward` calls at each step, in order."""

    def __init__(self, scale: float, fast: bool, window: int | None = None) -> None:
        """`fast` takes the flash kernel, which knows no `window` (pairs that a query sees, its own included)."""
        if fast and window is not None:
            raise ConfigError(f"fast=True, window={window}; accepted: one of them")
        self._scale, self._fast, self._window = scale, fast, window
        self._steps: list[tuple[Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [b t heads d]`, `k v [b t h d]` of this step, rotated; returns `[b t heads d]`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        self._steps.append((k, v))
        later = [x for pair in self._steps[1:] for x in pair]
        if self._fast:
            return chain_attention(q, *self._steps[0], self._scale, *later).transpose(1, 2)
        return chain_attention_reference(q, *self._steps[0], self._scale, *later, window=self._window).transpose(1, 2)


def chain_attention_reference(
    q: Heads, k0: Tensor, v0: Tensor, scale: float, *later: Tensor, window: int | None = None
) -> Heads:
    """The definition, in one softmax; `later` holds key, value, key, value, ... of the steps behind step 0."""
    groups, length = q.shape[1] // k0.shape[1], q.shape[2]
    k0, v0, *later_heads = (x.repeat_interleave(groups, dim=1) for x in (k0, v0, *later))
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    if window is not None:  # a query of step j stands j places behind its pair
        hidden |= torch.ones_like(hidden).tril(len(later) // 2 - window)
    scores = (q @ k0.transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))
    own = [(q * k).sum(-1, keepdim=True) * scale for k in later_heads[::2]]
    weights = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(q.dtype)
    out = weights[..., :length] @ v0
    for i, value in enumerate(later_heads[1::2]):
        out = out + weights[..., length + i, None] * value
    return out


def chain_attention(q: Heads, k0: Tensor, v0: Tensor, scale: float, *later: Tensor) -> Heads:
    """The same by a flash kernel for the step-0 keys, merged with the chain's own keys by log-sum-exp."""
    return _ChainAttention.apply(q, k0, v0, scale, *later)


@final
class _ChainAttention(torch.autograd.Function):
    """The flash backward kernel recomputes its weights as exp(score − lse): given the *merged* output and log-sum-exp,
    it returns exactly the share of the gradient that flows through the step-0 keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, scale: float, *later: Tensor) -> Tensor:
        q, k0, v0 = (x.contiguous() for x in (q, k0, v0))
        out, lse, rest = _flash(q, k0, v0, scale)
        if later:
            k, v = torch.stack(later[::2], dim=3), torch.stack(later[1::2], dim=3)  # [b h t steps d]
            grouped = q.unflatten(1, (k.shape[1], -1))  # [b h g t d]
            scores = torch.einsum("bhgtd,bhtsd->bhgts", grouped, k).float() * scale
            merged = torch.logaddexp(lse.unflatten(1, (k.shape[1], -1)), scores.logsumexp(-1))
            weights = (scores - merged[..., None]).exp()
            share = (lse.unflatten(1, (k.shape[1], -1)) - merged).exp()
            own = torch.einsum("bhgts,bhtsd->bhgtd", weights.to(v.dtype), v)
            out = (out.unflatten(1, (k.shape[1], -1)) * share[..., None] + own).flatten(1, 2).to(q.dtype)
            lse = merged.flatten(1, 2).contiguous()
        ctx.save_for_backward(q, k0, v0, out, lse, *later)
        ctx.scale, ctx.rest = scale, rest
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        q, k0, v0, out, lse, *later = ctx.saved_tensors
        # The flash kernels want the layout that their forward gave: [b t heads d] in memory.
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
        dq, dk0, dv0 = _flash_backward(grad, q, k0, v0, out, lse, ctx.scale, ctx.rest)
        if not later:
            return dq, dk0, dv0, None
        k, v = torch.stack(later[::2], dim=3), torch.stack(later[1::2], dim=3)
        grouped = q.unflatten(1, (k.shape[1], -1))
        grad_grouped = grad.unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("bhgtd,bhtsd->bhgts", grouped, k).float() * ctx.scale
        weights = (scores - lse.unflatten(1, (k.shape[1], -1))[..., None]).exp()
        delta = (grad.float() * out.float()).sum(-1).unflatten(1, (k.shape[1], -1))
        from_values = torch.einsum("bhgtd,bhtsd->bhgts", grad_grouped, v).float()
        dscores = (weights * (from_values - delta[..., None]) * ctx.scale).to(q.dtype)
        dq = dq + torch.einsum("bhgts,bhtsd->bhgtd", dscores, k).flatten(1, 2)
        dk = torch.einsum("bhgts,bhgtd->bhtsd", dscores, grouped)
        dv = torch.einsum("bhgts,bhgtd->bhtsd", weights.to(q.dtype), grad_grouped)
        behind = [x for step in range(k.shape[3]) for x in (dk[:, :, :, step], dv[:, :, :, step])]
        return dq, dk0, dv0, None, *behind


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, tuple]:
    """Causal attention, its log-sum-exp, and what the backward kernel wants besides."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        return out, lse, ()
    out, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
    return out, lse, tuple(rest[:6])


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, rest: tuple):
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, q, k, v, out, lse, 0.0, True, scale=scale)
    starts_q, starts_k, longest_q, longest_k, seed, offset = rest
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, 0.0, True, seed, offset, scale=scale
    )
