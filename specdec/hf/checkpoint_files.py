"""Checkpoint directories on disk: finding, reading and writing their files."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.errors import CheckpointError

TOKEN_ORDER = "token_order.safetensors"
"""Optional file of ours beside the weights: target ids, most frequent first, for a narrower draft vocabulary."""


def locate(path: str | Path) -> Path:
    """The local directory of a checkpoint: `path` itself, or the Hub repository of that name, downloaded.

    Raises `CheckpointError` where there is neither.
    """
    local = Path(path)
    if local.is_dir():
        return local
    if local.exists() or str(path).count("/") != 1:
        raise CheckpointError(
            f"{path}: expected a directory with config.json and weights, or a Hub repository owner/name"
        )
    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{path}: no such directory, and the Hub repository was not got: {error}") from error


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint.  Raises `CheckpointError` where it is missing or no JSON object."""
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{directory}: expected a config.json, found {_names(directory)}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(config).__name__}")
    return config


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint, safetensors before `.bin`, sharded or not; `.bin` is read with `weights_only`.

    Raises `CheckpointError` where there are none, or a file cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        tensors.update(_read_file(file))
    return tensors


def read_token_order(directory: Path) -> Tensor | None:
    """Target ids, most frequent first, where the checkpoint has them."""
    file = directory / TOKEN_ORDER
    return _read_file(file)["token_order"].long() if file.is_file() else None


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], token_order: Tensor | None) -> None:
    """Write `config.json` and `model.safetensors` (and the token order); each file appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    _save(directory / "model.safetensors", tensors)
    if token_order is not None:
        _save(directory / TOKEN_ORDER, {"token_order": token_order.to(torch.int32)})
    partial = directory / "config.json.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(directory / "config.json")


def _save(file: Path, tensors: dict[str, Tensor]) -> None:
    partial = file.with_name(file.name + ".partial")
    # Two names may share one storage (a lent embedding written twice), which safetensors refuses.
    save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, partial, {"format": "pt"})
    partial.replace(file)


def _weight_files(directory: Path) -> list[Path]:
    for kind, name in ((".safetensors", "model"), (".bin", "pytorch_model")):
        index = directory / f"{name}{kind}.index.json"
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            return [directory / shard for shard in shards]
        if (directory / f"{name}{kind}").is_file():
            return [directory / f"{name}{kind}"]
        others = [file for file in sorted(directory.glob(f"*{kind}")) if file.name != TOKEN_ORDER]
        if len(others) == 1:
            return others
        if others:
            found = ", ".join(file.name for file in others)
            raise CheckpointError(f"{directory}: expected one {kind} file or {name}{kind}.index.json, found {found}")
    raise CheckpointError(f"{directory}: expected model.safetensors or pytorch_model.bin, found {_names(directory)}")


def _read_file(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise CheckpointError(f"{file}: expected this file, which the index names; not found")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise CheckpointError(f"{file}: expected tensors only (it is read with weights_only=True): {error}") from error
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file}: expected readable tensors: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"{file}: expected a dictionary of tensors, found {type(loaded).__name__}")
    return loaded


def _names(directory: Path) -> str:
    return ", ".join(sorted(file.name for file in directory.iterdir())) or "an empty directory"
