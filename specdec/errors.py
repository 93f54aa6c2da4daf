"""Every error the library raises on purpose; all derive from `SpecdecError`."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class SpecdecError(Exception):
    """Base of the errors that specdec raises on purpose."""


class ConfigError(SpecdecError, ValueError):
    """An argument or configuration value that is not accepted; the message names it, the value and what is accepted."""


class UnsupportedError(SpecdecError, ValueError):
    """A feature, model or generation mode that specdec refuses by name, before any work is done."""


class OutOfPages(SpecdecError, RuntimeError):
    """The cache has no free page left; the message says how many tokens would still fit."""


class WindowError(SpecdecError, RuntimeError):
    """A `KVWriter` was used out of order: begin → stage each layer once → commit or abort."""


class CacheCorruption(SpecdecError, RuntimeError):
    """An integrity check of the paged cache found accounting that contradicts itself."""


class NonFiniteLogits(SpecdecError, RuntimeError):
    """The target produced NaN where a token had to be picked."""


class CheckpointError(SpecdecError, ValueError):
    """A checkpoint that cannot be read; the message names the tensor or key, what was expected and what was found."""


class ModelUnavailable(SpecdecError, RuntimeError):
    """A model that cannot be had or loaded; the message says why and what to do."""


class TrainingError(SpecdecError, RuntimeError):
    """Training cannot go on; the message says why and what is kept."""


def choose(name: str, value: str, options: Mapping[str, T]) -> T:
    """Look `value` up in `options`, or raise `ConfigError` naming the argument, the value and the accepted names."""
    if value not in options:
        raise ConfigError(f"{name}={value!r} is not known; accepted: {', '.join(sorted(options))}")
    return options[value]
