"""EAGLE drafters for Hugging Face models."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.draft.eagle import EagleDraftConfig, EagleDrafter
from specdec.draft.eagle_head import EagleHead
from specdec.draft.lm_head import has_int8
from specdec.errors import CheckpointError, ConfigError, UnsupportedError
from specdec.hf.checkpoint_formats import TargetShape
from specdec.hf.checkpoints import load_head
from specdec.kv.pages import PagedKVCache
from specdec.target import LayerShape

PAGE_SIZE = 16
CPU_SHAPE = {"width": 1, "depth": 4, "nodes": 4}
"""Drafts on a CPU unless asked otherwise: there each verified node costs time, so short chains pay best."""
SHIPPED_HEADS = "heads"
"""Folder of the package with the heads that come with it, one folder each."""


def load_eagle_drafter(path: str | Path | None, model: PreTrainedModel, **options: Any) -> EagleDrafter:
    """An EAGLE drafter for `model`.

    Args:
        path: a directory or Hub repository with a head in any EAGLE format; None takes the one shipped for the model.
        options: values of `EagleDraftConfig`.  On a CPU, drafts are short chains where neither `width`, `depth` nor
            `nodes` is given, and `lm_head` is rounded to int8 where `int8_lm_head` is not given.

    Raises `CheckpointError` where the head does not fit the model, `ConfigError` for bad options and where none ships.
    """
    config = EagleDraftConfig.of(**defaults_for(model.device, options), **options)
    if path is None:
        path = shipped_head(model)
    head = load_head(path, target_shape(model), dtype=model.dtype, device=model.device)
    return eagle_drafter(head, model, config)


def defaults_for(device: torch.device, options: Mapping[str, object]) -> dict[str, Any]:
    """Options that suit a device and that were not given."""
    if device.type != "cpu":
        return {}
    shape = {} if CPU_SHAPE.keys() & options.keys() else CPU_SHAPE
    rounded = {} if "int8_lm_head" in options else {"int8_lm_head": has_int8(device)}
    return {**shape, **rounded}


def eagle_drafter(head: EagleHead, model: PreTrainedModel, config: EagleDraftConfig | None = None) -> EagleDrafter:
    """An EAGLE drafter with a head that is in memory already; lends it the model's embedding and `lm_head`."""
    embeddings, lm_head = lendable_weights(model)
    return EagleDrafter(head.borrow(embeddings, lm_head), make_pages, config)


def target_shape(model: PreTrainedModel) -> TargetShape:
    """What a head must fit."""
    text = model.config.get_text_config()
    return TargetShape(text.hidden_size, text.vocab_size, text.num_hidden_layers)


def lendable_weights(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The model's embedding and `lm_head`.  Raises `UnsupportedError` where it has none to lend."""
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or lm_head is None:
        raise UnsupportedError(f"{type(model).__name__} has no embedding or no lm_head that a draft head could share")
    lent: tuple[Any, Any] = (embedding.weight, lm_head.weight)
    return lent


def make_pages(shape: LayerShape, num_tokens: int) -> PagedKVCache:
    """A paged cache for the head's one layer; it grows where generations outgrow it."""
    return PagedKVCache([shape], max(1, -(-num_tokens // PAGE_SIZE)), PAGE_SIZE, growable=True)


def fits(folder: Path, shape: TargetShape) -> bool:
    """Whether the head in a folder was made for targets of this shape."""
    try:
        load_head(folder, shape)
    except CheckpointError:
        return False
    return True


def shipped_head(model: PreTrainedModel) -> Path:
    """The folder of the head that ships for a model.  Raises `ConfigError` where there is none."""
    folder = Path(str(resources.files("specdec"))) / SHIPPED_HEADS
    candidates = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    shape = target_shape(model)
    for candidate in candidates:
        if fits(candidate, shape):
            return candidate
    names = ", ".join(path.name for path in candidates) or "none"
    raise ConfigError(
        f"no EAGLE head ships for {type(model).__name__} with hidden size {shape.hidden_size}, {shape.vocab_size} "
        f"tokens and {shape.num_layers} layers (shipped: {names}); train one with `specdec train`, or name one: "
        "drafter='eagle:PATH'"
    )
