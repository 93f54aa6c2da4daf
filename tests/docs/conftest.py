"""What the tests of documentation and examples run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specdec.hf.models
from tests.models import byte_tokenizer, tiny_llama

LoadModel = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a tokenizer of bytes, saved as `from_pretrained` expects it."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_llama(vocab_size=257, eos_token_id=256, num_hidden_layers=4).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def load_tiny(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> LoadModel:
    """`load_model`, which gives the tiny model for every name while the test runs."""
    load_model = specdec.hf.models.load_model

    def load(name: str = "", **options: Any) -> Any:
        return load_model(str(tiny_folder), **options)

    monkeypatch.setattr(specdec.hf.models, "load_model", load)
    return load
