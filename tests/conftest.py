"""What all tests share."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.hf.models import load_model

# A loaded machine is slow now and then; how long an example takes is no property under test.
settings.register_profile("specdec", deadline=None)
settings.load_profile("specdec")


@pytest.fixture(scope="session", autouse=True)
def share_the_cores() -> None:
    """Several pytest-xdist workers must not each use every core."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The default model in fp32 on the CPU, and its tokenizer: for tests marked `slow`."""
    return load_model(dtype="fp32", device="cpu", cache_dir=os.environ.get("SPECDEC_CACHE", "~/.cache/specdec"))
