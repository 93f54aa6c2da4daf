"""The draft's `lm_head`: over a part of the vocabulary, as it is or rounded to int8, and the best tokens of its logits.

On a CPU it is most of a draft step, and drafts need not be exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from specdec.draft.eagle_head import EagleHead
from specdec.errors import ConfigError, UnsupportedError

LmHead = Callable[[Tensor], Tensor]
"""`hidden [b f d] → logits [b f n]`."""


def plain_lm_head(weight: Float[Tensor, "n d"]) -> LmHead:
    """The weight as it is, shared."""
    return lambda hidden: F.linear(hidden.to(weight.dtype), weight)


def has_int8(device: torch.device) -> bool:
    """Whether `Int8LmHead` runs on a device."""
    return device.type == "cpu" and "onednn" in torch.backends.quantized.supported_engines


@final
class Int8LmHead:
    """Weights rounded to int8 (a scale per token); hidden states are rounded as they come (one scale).

    Raises `UnsupportedError` where torch has no such product.
    """

    def __init__(self, weight: Float[Tensor, "n d"]) -> None:
        engines = torch.backends.quantized.supported_engines
        if not has_int8(weight.device):
            raise UnsupportedError(
                f"int8_lm_head=True on {weight.device} with the engines {', '.join(engines)}; accepted: CPU, onednn"
            )
        weight = weight.float()
        self._scales = weight.abs().amax(1).clamp(min=1e-12) / 127
        self._zeros = torch.zeros(len(weight), dtype=torch.long)
        rounded = (weight / self._scales[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)

    def __call__(self, hidden: Float[Tensor, "b f d"]) -> Float[Tensor, "b f n"]:
        rows = hidden.flatten(0, 1).float()
        largest = rows.abs().amax().item()
        scale = largest / 127 if 0 < largest < float("inf") else 1.0
        rounded = (rows * (1 / scale)).round_().clamp_(-127, 127).to(torch.int8)
        if len(rounded) == 1:
            # For a single row oneDNN packs some weights anew at every call; two rows cost no more than one.
            return self._product(rounded.repeat(2, 1), scale)[:1, None]
        return self._product(rounded, scale).view(*hidden.shape[:-1], -1)

    def _product(self, rounded: Int[Tensor, "m d"], scale: float) -> Float[Tensor, "m n"]:
        weight = (self._packed, self._scales, self._zeros, None)
        return torch.ops.onednn.qlinear_pointwise(rounded, scale, 0, *weight, 1.0, 0, torch.float32, "none", [], "")


def narrowed(head: EagleHead, vocabulary: int | tuple[int, ...] | None) -> tuple[Int[Tensor, " n"] | None, Tensor]:
    """Target ids of the draft vocabulary (None: each row is its own id), and the rows of `lm_head` for them.

    Raises `ConfigError` for a vocabulary that the head does not have.
    """
    ids, weight = head.target_ids, head.lm_head_weight
    if vocabulary is not None:
        if isinstance(vocabulary, int):
            if head.token_order is None:
                raise ConfigError(
                    f"vocabulary={vocabulary}: the head does not say which tokens are frequent; give token ids"
                )
            wanted = head.token_order[:vocabulary].to(ids.device)
        else:
            wanted = torch.tensor(vocabulary, device=ids.device)
        keep = torch.isin(ids, wanted).nonzero().flatten()
        if len(keep) == 0:
            raise ConfigError(f"vocabulary={vocabulary!r}: the head can draft none of these tokens")
        ids, weight = ids[keep], weight[keep.to(weight.device)].contiguous()
    plain = len(ids) == head.config.vocab_size and bool((ids == torch.arange(len(ids), device=ids.device)).all())
    return None if plain else ids.to(head.device), weight.detach()


def best_of(logits: Float[Tensor, "b f n"], count: int) -> tuple[Float[Tensor, "b f k"], Int[Tensor, "b f k"]]:
    """`logits.topk(count)`, faster over many columns: the best lie in the blocks with the best maxima."""
    block = 64
    if logits.shape[2] % block or logits.shape[2] < 16 * block * count:
        return logits.topk(count, dim=2)
    blocks = logits.unflatten(2, (-1, block))
    chosen = blocks.amax(3).topk(count, dim=2).indices
    candidates = blocks.gather(2, chosen[..., None].expand(-1, -1, -1, block)).flatten(2)
    values, places = candidates.topk(count, dim=2)
    return values, chosen.gather(2, places // block) * block + places % block
