"""Picks one token per row: argmax where the row's temperature is 0, else a sample under temperature and min-p."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor


@triton.jit
def _sample_row(logits_ptr, temperature_ptr, log_min_p, seed_ptr, out_ptr, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seed_ptr)
    temperature = tl.load(temperature_ptr + row)
    column = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + column
        score = tl.load(logits_ptr + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        better = score > best
        best = tl.where(better, score, best)
        place = tl.where(better, at, place)
    top = tl.max(best, 0)
    if temperature > 0:
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + column
            score = tl.load(logits_ptr + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            score = (score - top) / temperature
            uniform = tl.rand(seed, (row * vocab + at).to(tl.int32))
            # Gumbel noise: the argmax of (log p + noise) is a sample from p.
            noisy = score - tl.log(-tl.log(tl.maximum(uniform, 1e-10)))
            noisy = tl.where(score >= log_min_p, noisy, float("-inf"))
            better = noisy > best
            best = tl.where(better, noisy, best)
            place = tl.where(better, at, place)
        top = tl.max(best, 0)
    winner = tl.min(tl.where(best == top, place, vocab), 0)
    tl.store(out_ptr + row, winner.to(tl.int64))


def sample_rows(
    logits: Float[Tensor, "b v"], temperature: Float[Tensor, " b"], log_min_p: float, seed: Int[Tensor, ""]
) -> Int[Tensor, " b"]:
    """One token per row; equal seeds and logits give equal tokens.  `b · v` must stay below 2³¹."""
    logits = logits.contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.long, device=logits.device)
    _sample_row[(logits.shape[0],)](logits, temperature, log_min_p, seed, out, logits.shape[1], BLOCK=2048, num_warps=8)
    return out
