"""How K/V rows lie in pages: as they are, or quantised with their scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.errors import ConfigError, choose
from specdec.types import decode_rows

SCALE_DTYPE = torch.bfloat16
"""Of scales per token and head: the range of fp32, and its rounding costs nothing, since codes are made with it."""


@dataclass(frozen=True)
class Encoded:
    """Rows of K or V of one layer."""

    parts: tuple[Tensor, ...]
    """What the pages store, one tensor for each part of the format."""
    rows: Float[Tensor, "b w h d"]
    """What a reader of the pages will get: the rows themselves, or what quantisation leaves of them."""


class RowCodec(ABC):
    """The format of the K or of the V rows of one layer."""

    @abstractmethod
    def parts(self, num_heads: int, size: int, dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and type of each part of one token's row."""

    @abstractmethod
    def encode(self, rows: Float[Tensor, "b w h d"]) -> Encoded:
        """Turn rows into what is stored of them."""

    @abstractmethod
    def pages(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Codes `[num_pages page_size h d]` and scales, as `KVView` has them, of the stored pages of all parts."""


@final
class PlainRows(RowCodec):
    """Rows as they are."""

    def parts(self, num_heads: int, size: int, dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        return (((num_heads, size), dtype),)

    def encode(self, rows: Float[Tensor, "b w h d"]) -> Encoded:
        return Encoded((rows,), rows)

    def pages(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        return stored[0], None


@dataclass(frozen=True)
class CodeType:
    """A type of eight bits."""

    dtype: torch.dtype
    stored: torch.dtype
    """The type of the pages' storage, which only ever moves bytes."""
    largest: float

    def quantise(self, scaled: Float[Tensor, ...]) -> Tensor:
        """Nearest codes of numbers that scales brought into range."""
        inside = scaled.clamp(-self.largest, self.largest)
        return (inside if self.dtype.is_floating_point else inside.round()).to(self.dtype)


CODE_TYPES = {
    "fp8_e4m3": CodeType(torch.float8_e4m3fn, torch.uint8, 448.0),
    "int8": CodeType(torch.int8, torch.int8, 127.0),
}
"""The accepted `kv_dtype`s."""


@final
class ScaledPerToken(RowCodec):
    """Codes, and one scale per token and head in pages of their own: the largest magnitude of the row is kept."""

    def __init__(self, code: CodeType) -> None:
        self._code = code

    def parts(self, num_heads: int, size: int, dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        return ((num_heads, size), self._code.stored), ((num_heads,), SCALE_DTYPE)

    def encode(self, rows: Float[Tensor, "b w h d"]) -> Encoded:
        wide = rows.float()
        scales = (wide.abs().amax(-1) / self._code.largest).to(SCALE_DTYPE)
        # A row of zeros, or of numbers too small for a scale, is a row of zeros.
        divisor = scales.float().masked_fill(scales == 0, torch.inf)
        codes = self._code.quantise(wide / divisor[..., None])
        return Encoded((codes.view(self._code.stored), scales), decode_rows(codes, scales, rows.dtype))

    def pages(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        return stored[0].view(self._code.dtype), stored[1]


@final
class ScaledPerLayer(RowCodec):
    """Codes under one scale for the whole layer, such as checkpoints bring along; the scale is passed whole."""

    def __init__(self, code: CodeType, scale: float, device: torch.device) -> None:
        self._code = code
        self._scale = torch.tensor([scale], dtype=torch.float32, device=device)

    def parts(self, num_heads: int, size: int, dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        return (((num_heads, size), self._code.stored),)

    def encode(self, rows: Float[Tensor, "b w h d"]) -> Encoded:
        codes = self._code.quantise(rows.float() / self._scale)
        return Encoded((codes.view(self._code.stored),), decode_rows(codes, self._scale, rows.dtype))

    def pages(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        return stored[0].view(self._code.dtype), self._scale


LayerScales = Sequence[tuple[float, float]]
"""K and V scale of each layer."""


def make_codecs(
    devices: Sequence[torch.device], kv_dtype: str | None, layer_scales: LayerScales | None
) -> list[tuple[RowCodec, RowCodec]]:
    """The K and V codec of each layer.  Raises `ConfigError` for unknown types, and for scales that do not fit."""
    if kv_dtype is None:
        if layer_scales is not None:
            raise ConfigError("layer_scales are given without kv_dtype; accepted: with a quantised one")
        return [(PlainRows(), PlainRows()) for _ in devices]
    code = choose("kv_dtype", kv_dtype, CODE_TYPES)
    if layer_scales is None:
        return [(ScaledPerToken(code), ScaledPerToken(code)) for _ in devices]
    if len(layer_scales) != len(devices):
        raise ConfigError(f"layer_scales for {len(layer_scales)} layers; accepted: {len(devices)}, one pair per layer")
    for layer, pair in enumerate(layer_scales):
        if any(not 0 < scale < float("inf") for scale in pair):
            raise ConfigError(f"layer_scales of layer {layer} are {pair}; accepted: positive numbers")
    pairs = zip(devices, layer_scales, strict=True)
    return [(ScaledPerLayer(code, k, device), ScaledPerLayer(code, v, device)) for device, (k, v) in pairs]
