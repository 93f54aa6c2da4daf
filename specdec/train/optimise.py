"""One optimiser step of a head: fp32 masters beside the working copy, forward and backward in one CUDA graph."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.draft.eagle_head import EagleHead
from specdec.errors import ConfigError
from specdec.train.eagle import Batch, TestTimeTraining, test_time_loss
from specdec.train.losses import Teacher

RunTeacher = Callable[[Int[Tensor, "b t"]], tuple[tuple[Tensor, ...], Float[Tensor, "b t v"]]]
"""Taps and logits of rows; `TeacherModel`."""


@dataclass(frozen=True)
class OptimiserConfig:
    """AdamW with warm-up and a cosine to zero."""

    learning_rate: float = 3e-3
    warmup_share: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}; accepted: a positive number")
        if not 0 <= self.warmup_share < 1:
            raise ConfigError(f"warmup_share={self.warmup_share!r}; accepted: 0 to below 1")

    def rate_at(self, progress: float) -> float:
        """Learning rate at a share of the whole training."""
        if progress < self.warmup_share:
            return self.learning_rate * progress / self.warmup_share
        through = (progress - self.warmup_share) / (1 - self.warmup_share)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(through, 1.0)))


@final
class HeadOptimiser:
    """Trains `masters` (an fp32 head) through a working copy in the target's dtype; shapes of batches must not change.

    With `process_group` the gradients are averaged over its processes.
    """

    def __init__(
        self,
        masters: EagleHead,
        teacher: RunTeacher,
        recipe: TestTimeTraining,
        config: OptimiserConfig,
        dtype: torch.dtype,
        processes: int = 1,
    ) -> None:
        self.masters, self._teacher, self._recipe, self.config = masters, teacher, recipe, config
        self.working = _working_copy(masters, dtype)
        self._processes = processes
        # Looked up once: the lookup of a shared lm_head waits for the device, which a capture must not do.
        self._lm_head = self.working.lm_head_weight
        self._masters = [p for p in masters.parameters() if p.requires_grad]
        self._copies = [p for p in self.working.parameters() if p.requires_grad]
        device = self._masters[0].device
        self.adamw = torch.optim.AdamW(
            self._masters,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=device.type == "cuda",
        )
        self._grads = [torch.zeros_like(parameter) for parameter in self._masters]
        for parameter, grad in zip(self._masters, self._grads, strict=True):
            parameter.grad = grad
        self._fast = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: tuple[Batch, list[Tensor], Tensor] | None = None
        self._use_graph = device.type == "cuda"

    def step(self, batch: Batch, progress: float) -> Float[Tensor, "steps 2"]:
        """One update; returns loss and agreement of each unrolled step, on the device (valid until the next call)."""
        gradients, figures = self._gradients(batch)
        torch._foreach_copy_(self._grads, gradients)
        if self._processes > 1:
            _average(self._grads, self._processes)
        torch.nn.utils.clip_grad_norm_(self._masters, self.config.clip, foreach=True)
        for group in self.adamw.param_groups:
            group["lr"] = self.config.rate_at(progress)
        self.adamw.step()
        self.refresh()
        return figures

    def measure(self, batch: Batch, repeats: int = 10) -> float:
        """Seconds that one step takes; the parameters stay as they are."""
        device = self._masters[0].device
        for repeat in range(repeats + 2):
            if repeat == 2:  # the first ones compile and capture
                _finish(device)
                began = time.monotonic()
            self._gradients(batch)
        _finish(device)
        return (time.monotonic() - began) / repeats + (5e-4 if device.type == "cuda" else 0)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the working copy up to date with the masters."""
        torch._foreach_copy_([p.detach() for p in self._copies], [p.detach() for p in self._masters])

    def _gradients(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        if not self._use_graph:
            return self._compute(batch)
        if self._static is None:
            self._capture(batch)
        assert self._static is not None and self._graph is not None
        held, gradients, figures = self._static
        for mine, given in ((held.tokens, batch.tokens), (held.places, batch.places), (held.weights, batch.weights)):
            mine.copy_(given)
        self._graph.replay()
        return gradients, figures

    def _compute(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        taps, logits = self._teacher(batch.tokens)
        flat = logits.flatten(0, 1)
        if self.masters.config.reduced:
            inside = self.working.t2d[flat.argmax(-1)]
            batch = Batch(batch.tokens, batch.places, batch.weights * inside[batch.places])
            flat = flat[:, self.working.target_ids]
        else:
            flat = flat[:, : self.masters.config.vocab_size]
        teacher = Teacher.of(flat, self._recipe.sharpness)
        loss, figures = test_time_loss(self.working, batch, taps, teacher, self._recipe, self._fast, self._lm_head)
        return list(torch.autograd.grad(loss, self._copies)), figures

    def _capture(self, batch: Batch) -> None:
        held = Batch(batch.tokens.clone(), batch.places.clone(), batch.weights.clone())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles everything, which must not happen inside a capture
                self._compute(held)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            gradients, figures = self._compute(held)
        self._static = (held, gradients, figures)


def _working_copy(masters: EagleHead, dtype: torch.dtype) -> EagleHead:
    copied = copy.deepcopy(masters).to(dtype)
    borrowed = masters._borrowed
    return copied.borrow(borrowed.get("embed_tokens.weight"), borrowed.get("lm_head.weight"))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _average(gradients: list[Tensor], processes: int) -> None:
    flat = torch.cat([g.flatten() for g in gradients])
    torch.distributed.all_reduce(flat)
    flat /= processes
    torch._foreach_copy_(
        gradients,
        [part.view_as(g) for part, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)],
    )
