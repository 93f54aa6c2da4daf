"""Soft cross-entropy against the teacher, straight from hidden states, so that logits are written only once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Teacher:
    """The target's logits, computed once and shared by all steps of training-time test."""

    logits: Float[Tensor, "m v"]
    sharpness: float
    """The student learns `softmax(sharpness · logits)`; 1 is the target's own distribution."""
    lse: Float[Tensor, " m"]
    best: Int[Tensor, " m"]

    @staticmethod
    def of(logits: Float[Tensor, "m v"], sharpness: float = 1.0) -> Teacher:
        """Look through the logits once."""
        logits = logits.contiguous()
        if logits.device.type == "cuda":
            from specdec.kernels.soft_cross_entropy import row_statistics  # triton exists only beside CUDA

            return Teacher(logits, sharpness, *row_statistics(logits, sharpness))
        scaled = logits.float() * sharpness
        return Teacher(logits, sharpness, scaled.logsumexp(-1), logits.argmax(-1))


def soft_cross_entropy(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    teacher: Teacher,
    teacher_rows: Int[Tensor, " n"],
    row_weights: Float[Tensor, " n"],
) -> tuple[Float[Tensor, ""], Int[Tensor, " n"]]:
    """Weighted sum of the rows' cross-entropies, and the argmax of each row of `hidden @ weight.T`.

    Row `i` is held against row `teacher_rows[i]` of the teacher.  Differentiable in `hidden` and `weight`, once.
    """
    return _SoftCrossEntropy.apply(hidden, weight, teacher, teacher_rows, row_weights)


@final
class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher: Teacher, rows: Tensor, row_weights: Tensor) -> tuple:
        logits = hidden @ weight.T
        if logits.device.type == "cuda":
            from specdec.kernels.soft_cross_entropy import soft_cross_entropy_

            loss, best = soft_cross_entropy_(logits, teacher.logits, rows, teacher.lse, teacher.sharpness, row_weights)
        else:
            loss, best = _soft_cross_entropy_(logits, teacher, rows, row_weights)
        # `logits` holds its own gradient now.
        ctx.save_for_backward(
            logits @ weight if ctx.needs_input_grad[0] else None,
            logits.T @ hidden if ctx.needs_input_grad[1] else None,
        )
        ctx.mark_non_differentiable(best)
        return loss.sum(), best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
        for_hidden, for_weight = ctx.saved_tensors
        return (
            None if for_hidden is None else for_hidden * grad,
            None if for_weight is None else for_weight * grad,
            None,
            None,
            None,
        )


def _soft_cross_entropy_(student: Tensor, teacher: Teacher, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What the Triton kernel does, in plain torch."""
    log_q = student.float().log_softmax(-1)
    p = (teacher.logits[rows].float() * teacher.sharpness - teacher.lse[rows, None]).exp()
    best = student.argmax(-1)
    loss = -(p * log_q).sum(-1) * weights
    student.copy_((log_q.exp() - p) * weights[:, None])
    return loss, best
