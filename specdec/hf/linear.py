"""Cheaper fp32 matrix products for small windows on CPUs that compute with MKL.

MKL multiplies one to three rows by a weight as it lies in memory.  From 4 to 15 rows on it first packs the whole weight
into a buffer, again in every call: for a language-model head of 113 MB that costs more than the product itself, and 8
rows take longer than 16.  Cut into groups of output features that fit the cache, as one batched product over a view of
the same weight, nothing large is packed; no copy of the weight is made, and the sums are the same up to fp32 rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

FEWEST_ROWS = 4
MOST_ROWS = 15
"""Rows between which grouping wins; measured with MKL 2024.2 on a Xeon with AVX-512."""

GROUP_ELEMENTS = 32_768
"""About how many weights one group has (128 KiB)."""

SMALLEST_WEIGHT = 1 << 20
"""Fewest elements of a weight worth grouping."""


@contextmanager
def fast_linears(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Within the context, compute the model's large fp32 linear layers in groups where that is faster.

    Yields the names of the layers it holds for: none on other devices, dtypes and BLAS libraries.  Only the `forward`
    of these `nn.Linear` instances is covered, and uncovered on exit; weights, `state_dict` and classes stay as they
    are.  Contexts may be nested.  The model must not be moved or cast inside.
    """
    covered = {name: module for name, module in model.named_modules() if _can_gain(module)}
    for module in covered.values():
        module.__dict__["forward"] = partial(_forward, module)
    try:
        yield tuple(covered)
    finally:
        for module in covered.values():
            del module.__dict__["forward"]


def _can_gain(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    weight = module.weight
    is_large_fp32 = weight.dtype == torch.float32 and weight.numel() >= SMALLEST_WEIGHT and weight.is_contiguous()
    return is_large_fp32 and weight.device.type == "cpu" and torch.backends.mkl.is_available()


def _forward(layer: nn.Linear, x: Float[Tensor, "*rows i"]) -> Float[Tensor, "*rows o"]:
    num_rows = x.numel() // layer.in_features
    if FEWEST_ROWS <= num_rows <= MOST_ROWS:
        return grouped_linear(x, layer.weight, layer.bias)
    return F.linear(x, layer.weight, layer.bias)


def grouped_linear(
    x: Float[Tensor, "*rows i"],
    weight: Float[Tensor, "o i"],
    bias: Float[Tensor, " o"] | None = None,
    group_elements: int = GROUP_ELEMENTS,
) -> Float[Tensor, "*rows o"]:
    """`F.linear(x, weight, bias)` in groups of output features: one batched product over a view of `weight`."""
    outputs, inputs = weight.shape
    size = max(1, min(outputs, group_elements // inputs))
    groups = outputs // size
    rows = x.reshape(-1, inputs)
    views = weight[: groups * size].view(groups, size, inputs).transpose(1, 2)
    y = torch.bmm(rows.expand(groups, *rows.shape), views).transpose(0, 1).contiguous()
    y = y.view(len(rows), groups * size)
    if groups * size < outputs:
        y = torch.cat([y, F.linear(rows, weight[groups * size :])], dim=1)
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], outputs)
