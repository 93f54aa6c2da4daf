"""Frozen, validated configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from specdec.errors import ConfigError
from specdec.types import MAX_WINDOW


@dataclass(frozen=True)
class SpecConfig:
    """How a `SpeculativeDecoder` runs; unknown names and invalid values raise `ConfigError`."""

    max_drafts: int = MAX_WINDOW - 1
    """Most drafted nodes of a row in one step, whatever the drafter would like (0 to 63)."""
    page_size: int = 16
    """Tokens of one page: 1, 4, 16 or 64."""
    num_pages: int | None = None
    """Pages of the cache, for a hard limit (`OutOfPages` beyond it); None: as many as the generation needs."""
    prefill_chunk: int = 2048
    """Most prompt tokens of one row run through the model at once."""
    kv_dtype: str | None = None
    """`fp8_e4m3` or `int8` quantises what the pages store; None keeps the model's own type."""
    kv_scales: tuple[tuple[float, float], ...] | None = None
    """One K and V scale per layer for quantised pages, as checkpoints bring them; None: a scale per token and head."""

    def __post_init__(self) -> None:
        require_int("max_drafts", self.max_drafts, 0, MAX_WINDOW - 1)
        if self.page_size not in (1, 4, 16, 64):
            raise ConfigError(f"page_size={self.page_size!r}; accepted: 1, 4, 16, 64")
        if self.num_pages is not None:
            require_int("num_pages", self.num_pages, 1, None)
        require_int("prefill_chunk", self.prefill_chunk, 1, None)
        if self.kv_dtype not in (None, "fp8_e4m3", "int8"):
            raise ConfigError(f"kv_dtype={self.kv_dtype!r}; accepted: None, 'fp8_e4m3', 'int8'")

    @staticmethod
    def of(**values: Any) -> SpecConfig:
        """Build a configuration from keyword arguments, refusing unknown names by name."""
        return build_config(SpecConfig, values)


def require_int(name: str, value: object, low: int, high: int | None) -> None:
    """Raise `ConfigError` unless `value` is an integer between `low` and `high` (None: no upper limit)."""
    accepted = f"an integer ≥ {low}" if high is None else f"an integer from {low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise ConfigError(f"{name}={value!r}; accepted: {accepted}")


def require_number(name: str, value: object, low: float, high: float) -> None:
    """Raise `ConfigError` unless `value` is a number between `low` and `high`, both included."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}; accepted: a number from {low} to {high}")


def build_config(kind: type, values: dict[str, Any]) -> Any:
    """Build a configuration dataclass from a dictionary, refusing unknown names by name."""
    known = [field.name for field in fields(kind)]
    for name in values:
        if name not in known:
            accepted = ", ".join(known)
            raise ConfigError(f"{name}={values[name]!r}: unknown option of {kind.__name__}; accepted: {accepted}")
    return kind(**values)
