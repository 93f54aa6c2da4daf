"""Assistants: any smaller Hugging Face model with the same tokenizer drafts for a larger one."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.config import build_config
from specdec.draft.assistant import AssistantConfig, AssistantDrafter
from specdec.errors import ConfigError
from specdec.hf.models import DTYPES, load_model
from specdec.hf.target import HFTarget
from specdec.kv.deferred import DeferredWriter
from specdec.kv.pages import PagedKVCache
from specdec.kv.writer import KVWriter
from specdec.target import LayerShape

PAGE_SIZE = 16


def make_assistant(assistant: PreTrainedModel, model: PreTrainedModel, **options: Any) -> AssistantDrafter:
    """A drafter that asks `assistant`; `options` are those of `AssistantConfig`.

    Raises `ConfigError` where the vocabularies differ in size and `common_vocabulary` is not set, `UnsupportedError`
    where the assistant cannot be driven.
    """
    config = build_config(AssistantConfig, options)
    return AssistantDrafter(HFTarget(assistant), HFTarget(model).vocab_size, make_store, config)


def load_assistant(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any
) -> AssistantDrafter:
    """Load the model that `name` stands for, in the target's dtype and on its device, and make it the assistant.

    With the target's `tokenizer` given, an assistant of other tokens raises `ConfigError` naming the first of them.
    """
    dtype = next((word for word, kind in DTYPES.items() if kind == model.dtype), "auto")
    assistant, its_tokenizer = load_model(name, dtype, device=str(model.device))
    if tokenizer is not None:
        check_same_tokens(tokenizer, its_tokenizer)
    return make_assistant(assistant, model, **options)


def check_same_tokens(target: PreTrainedTokenizerBase, assistant: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError`, naming the first differing token, unless both tokenizers give equal ids to equal tokens."""
    ours, theirs = ({i: token for token, i in each.get_vocab().items()} for each in (target, assistant))
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i):
            raise ConfigError(
                f"the assistant has another tokenizer: {len(theirs)} tokens against {len(ours)}, token {i} is "
                f"{theirs.get(i)!r} against {ours.get(i)!r}; accepted: an assistant with the target's tokenizer"
            )


def make_store(layers: tuple[LayerShape, ...], num_rows: int, max_length: int) -> tuple[PagedKVCache, KVWriter]:
    """The assistant's own pages, which grow where drafts outgrow them, and a writer into them."""
    num_pages = max(1, num_rows * -(-min(max_length, 8192) // PAGE_SIZE))
    cache = PagedKVCache(layers, num_pages, PAGE_SIZE, growable=True)
    return cache, DeferredWriter(cache)
