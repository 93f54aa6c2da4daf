"""Rotary position embedding of draft heads, which keep rope settings of their own whatever the target uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import ConfigError, choose


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotation; `scaling` holds what a Hugging Face `rope_scaling` entry says but its type."""

    theta: float = 10000.0
    kind: str = "default"
    scaling: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choose("rope kind", self.kind, dict(_FREQUENCIES))
        if not self.theta > 0:
            raise ConfigError(f"rope theta={self.theta!r}; accepted: a positive number")
        missing = [name for name in _REQUIRED[self.kind] if name not in self.scaling]
        if missing:
            raise ConfigError(f"rope kind {self.kind!r} lacks {', '.join(missing)}; found: {dict(self.scaling)}")

    def frequencies(self, head_dim: int) -> Float[Tensor, " half"]:
        """Inverse frequencies, one for each pair of channels."""
        plain = self.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
        return _FREQUENCIES[self.kind](plain, self)

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines: 1 but for yarn (Peng et al. 2023, arXiv:2309.00071, section 3.4)."""
        if self.kind != "yarn":
            return 1.0
        given = self.scaling.get("attention_factor")
        return given if given is not None else _yarn_factor(self.scaling)


def rotate(x: Float[Tensor, "b w h d"], cos: Float[Tensor, "b w d"], sin: Float[Tensor, "b w d"]) -> Tensor:
    """Turn each pair (i, i + d/2) of channels by its position's angle."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos[:, :, None] + turned * sin[:, :, None]


def cos_sin(
    frequencies: Float[Tensor, " half"], positions: Int[Tensor, "b w"], factor: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "b w d"], Float[Tensor, "b w d"]]:
    """Cosines and sines of the positions' angles, computed in fp32."""
    angles = positions[..., None].float() * frequencies.float()
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _linear(plain: Tensor, rope: RopeConfig) -> Tensor:
    return plain / rope.scaling["factor"]


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long waves are stretched, short ones kept, those between blended."""
    scaling = rope.scaling
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / scaling["factor"] * (1 - blend) + plain * blend


def _yarn(plain: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN: channels that turn often keep their frequency, others are interpolated (arXiv:2309.00071, section 3.2)."""
    scaling, pairs = rope.scaling, len(plain)
    original = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = ((torch.arange(pairs, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling["factor"] * ramp + plain * (1 - ramp)


def _yarn_factor(scaling: Mapping[str, float]) -> float:
    def grown(weight: float) -> float:
        factor = scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1.0)


_FREQUENCIES = {
    "default": lambda plain, rope: plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
