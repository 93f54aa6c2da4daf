"""Reading and writing draft heads in every EAGLE format that is in use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.draft.eagle_config import EagleHeadConfig
from specdec.draft.eagle_head import EagleHead
from specdec.errors import CheckpointError, ConfigError, choose
from specdec.hf import checkpoint_files
from specdec.hf.checkpoint_export import EXPORTS, Verifier
from specdec.hf.checkpoint_formats import TargetShape, canonical_names, detect, head_config


def load_head(
    path: str | Path,
    target: TargetShape | None = None,
    *,
    taps: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **overrides: Any,
) -> EagleHead:
    """Read a head from a directory or a Hub repository, in whatever EAGLE format it is.

    Args:
        target: what the head must fit; it also says which layers are tapped where the checkpoint does not.
        taps: target layer inputs to read, whatever the checkpoint says.
        dtype: None keeps the checkpoint's.
        overrides: values of `EagleHeadConfig` that take the place of what the checkpoint says.

    Raises `UnsupportedError` for other kinds of draft models, and `CheckpointError`, which names the tensor, the
    expected and the found shape.
    """
    directory = checkpoint_files.locate(path)
    raw, stored = checkpoint_files.read_config(directory), checkpoint_files.read_tensors(directory)
    kind = detect(raw, stored)
    tensors = canonical_names(stored)
    if taps is not None:
        raw = raw | {"eagle_aux_hidden_state_layer_ids": list(taps)}
    config = head_config(kind, raw, tensors, target)
    for name, value in overrides.items():
        if name not in vars(config):
            raise ConfigError(
                f"{name}={value!r}: unknown option of EagleHeadConfig; accepted: {', '.join(vars(config))}"
            )
    config = replace(config, **overrides)
    if target is not None:
        check_fits(config, target)
    head = build_head(config, tensors)
    head.set_token_order(checkpoint_files.read_token_order(directory))
    return head.to(device=device, dtype=dtype or tensors["fc.weight"].dtype)


def save_head(
    head: EagleHead,
    path: str | Path,
    format: str = "speculators",
    *,
    verifier: Verifier | None = None,
    standalone: bool = True,
) -> None:
    """Write a head as safetensors: `speculators` (vLLM) or `safeailab` (SafeAILab's EAGLE, SGLang).

    Args:
        verifier: the target that the configuration names.
        standalone: write the borrowed embedding and `lm_head` too, as other engines want them; False keeps the files
            small, for `load_head`.

    Raises `UnsupportedError` where the format cannot express the head.
    """
    export: Any = choose("format", format, dict(EXPORTS))
    tensors = saved_tensors(head, standalone)
    config, named = export(head, tensors, verifier or Verifier())
    checkpoint_files.write(Path(path), config, named, head.token_order)


def saved_tensors(head: EagleHead, standalone: bool) -> dict[str, Tensor]:
    """Parameters and vocabulary map of a head under canonical names."""
    tensors = dict(head.state_dict())
    if standalone:
        tensors["embed_tokens.weight"] = head.embedding_weight[: head.config.vocab_size]
        if head.config.kind == "eagle3":
            tensors["lm_head.weight"] = head.lm_head_weight
    if head.config.reduced:
        tensors["d2t"], tensors["t2d"] = head.d2t, head.t2d
    return tensors


def build_head(config: EagleHeadConfig, tensors: dict[str, Tensor]) -> EagleHead:
    """A head with these weights (canonical names).  Raises `CheckpointError` unless they are exactly those it needs."""
    with torch.device("meta"):
        head = EagleHead(config)
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    weights = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    check_tensors(expected, weights)
    dtype = weights["fc.weight"].dtype
    head.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    set_vocabulary(head, tensors)
    return head.requires_grad_(False).eval()


def check_tensors(expected: dict[str, tuple[int, ...]], found: dict[str, Tensor]) -> None:
    """Raise `CheckpointError` naming the first tensor that is missing, unexpected, of another shape, or not finite."""
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{name}: expected shape {shape}, found no such tensor")
        if tuple(found[name].shape) != shape:
            raise CheckpointError(f"{name}: expected shape {shape}, found {tuple(found[name].shape)}")
    for name, tensor in found.items():
        if name not in expected:
            raise CheckpointError(f"{name}: expected no such tensor in this head, found shape {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{name}: expected floating-point numbers of shape {expected[name]}, found {tensor.dtype}"
            )
        if not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise CheckpointError(
                f"{name}: expected finite numbers of shape {expected[name]}, found {bad} that are not"
            )


def set_vocabulary(head: EagleHead, tensors: dict[str, Tensor]) -> None:
    """Read `d2t` (offsets: token `i` of the head is `i + d2t[i]`) and check `t2d` against it."""
    config = head.config
    if "d2t" not in tensors:
        if config.reduced:
            raise CheckpointError(
                f"d2t: expected shape ({config.num_draft_tokens},) for a draft vocabulary of {config.num_draft_tokens} "
                f"of {config.vocab_size} tokens, found no such tensor"
            )
        return
    offsets = tensors["d2t"].long()
    if offsets.shape != (config.num_draft_tokens,):
        raise CheckpointError(f"d2t: expected shape ({config.num_draft_tokens},), found {tuple(offsets.shape)}")
    head.set_vocabulary(offsets + torch.arange(len(offsets)))
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), head.t2d):
        known, size = int(tensors["t2d"].bool().sum()), tuple(tensors["t2d"].shape)
        raise CheckpointError(
            f"t2d: expected shape ({config.vocab_size},), true at the {config.num_draft_tokens} ids of d2t, "
            f"found {size} with {known} true"
        )


def check_fits(config: EagleHeadConfig, target: TargetShape) -> None:
    """Raise `CheckpointError` unless the head was made for a target of this shape."""
    if config.feature_size != target.hidden_size:
        width = len(config.taps) * target.hidden_size + (config.hidden_size if config.kind == "eagle1" else 0)
        found = len(config.taps) * config.feature_size + (config.hidden_size if config.kind == "eagle1" else 0)
        raise CheckpointError(
            f"fc.weight: expected shape ({config.hidden_size}, {width}) for a target of hidden size "
            f"{target.hidden_size}, found ({config.hidden_size}, {found})"
        )
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"embed_tokens.weight: expected shape ({target.vocab_size}, {config.hidden_size}) for a target of "
            f"{target.vocab_size} tokens, found ({config.vocab_size}, {config.hidden_size})"
        )
    for name, own in (("embed_tokens.weight", config.own_embeddings), ("lm_head.weight", not config.tie_lm_head)):
        if not own and config.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"{name}: expected a tensor of width {config.hidden_size} in the checkpoint, since the target's has "
                f"width {target.hidden_size}; found none"
            )
