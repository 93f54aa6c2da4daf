"""Cross-entropy against a teacher's softmax, one pass over each row, the gradient written over the student's logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

LOWEST = tl.constexpr(-1e30)
"""Where running maxima start: finite, so that lanes that see nothing but padding hold 0 and not NaN."""


@triton.jit
def _row_statistics(logits_ptr, sharpness, lse_ptr, best_ptr, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + column
        x = tl.load(logits_ptr + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * sharpness
        new_top = tl.maximum(top, x)
        total = total * tl.exp(top - new_top) + tl.exp(x - new_top)
        place = tl.where(x > top, at, place)
        top = new_top
    highest = tl.max(top, 0)
    tl.store(lse_ptr + row, highest + tl.log(tl.sum(total * tl.exp(top - highest), 0)))
    tl.store(best_ptr + row, tl.min(tl.where(top == highest, place, vocab), 0).to(tl.int64))


@triton.jit
def _soft_cross_entropy(
    student_ptr,
    teacher_ptr,
    teacher_row_ptr,
    teacher_lse_ptr,
    sharpness,
    weight_ptr,
    loss_ptr,
    best_ptr,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    teacher_row = tl.load(teacher_row_ptr + row)
    teacher_lse = tl.load(teacher_lse_ptr + teacher_row)
    weight = tl.load(weight_ptr + row)
    column = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + column
        inside = at < vocab
        x = tl.load(student_ptr + row * vocab + at, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(teacher_ptr + teacher_row * vocab + at, mask=inside, other=float("-inf")).to(tl.float32)
        cross += tl.where(inside, tl.exp(t * sharpness - teacher_lse) * x, 0.0)
        new_top = tl.maximum(top, x)
        total = total * tl.exp(top - new_top) + tl.exp(x - new_top)
        place = tl.where(x > top, at, place)
        top = new_top
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(loss_ptr + row, (lse - tl.sum(cross, 0)) * weight)
    tl.store(best_ptr + row, tl.min(tl.where(top == highest, place, vocab), 0).to(tl.int64))
    for start in range(0, vocab, BLOCK):
        at = start + column
        inside = at < vocab
        x = tl.load(student_ptr + row * vocab + at, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(teacher_ptr + teacher_row * vocab + at, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(x - lse) - tl.exp(t * sharpness - teacher_lse)) * weight
        tl.store(student_ptr + row * vocab + at, gradient.to(student_ptr.dtype.element_ty), mask=inside)


def row_statistics(logits: Float[Tensor, "n v"], sharpness: float) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
    """Log-sum-exp of `sharpness · logits` and the argmax of each row."""
    rows, vocab = logits.shape
    lse = torch.empty(rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.long, device=logits.device)
    _row_statistics[(rows,)](logits, sharpness, lse, best, vocab, BLOCK=2048, num_warps=8)
    return lse, best


def soft_cross_entropy_(
    student: Float[Tensor, "n v"],
    teacher: Float[Tensor, "m v"],
    teacher_rows: Int[Tensor, " n"],
    teacher_lse: Float[Tensor, " m"],
    sharpness: float,
    weights: Float[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
    """Weighted loss of each row and the student's argmax; `student` is overwritten by the gradient of the weighted sum.

    Row `i` is held against `softmax(sharpness · teacher[teacher_rows[i]])`.
    """
    rows, vocab = student.shape
    loss = torch.empty(rows, dtype=torch.float32, device=student.device)
    best = torch.empty(rows, dtype=torch.long, device=student.device)
    _soft_cross_entropy[(rows,)](
        student,
        teacher,
        teacher_rows,
        teacher_lse,
        sharpness,
        weights,
        loss,
        best,
        vocab,
        BLOCK=2048,
        num_warps=8,
    )
    return loss, best
