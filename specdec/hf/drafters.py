"""Drafters by name."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.draft.adaptive import AdaptiveDrafter
from specdec.draft.base import Drafter
from specdec.draft.hybrid import HybridDrafter
from specdec.draft.none import NoDrafter
from specdec.errors import ConfigError
from specdec.kv.prefix import PrefixCache

NAMES = (
    "none",
    "ngram",
    "suffix",
    "assistant:MODEL",
    "eagle",
    "eagle:PATH",
    "eagle+suffix",
    "eagle:PATH+suffix",
    "adaptive:NAME",
)


def make_drafter(
    spec: str | Drafter | PreTrainedModel | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> Drafter:
    """Build the drafter that `spec` names for `model`.

    A `Drafter` is taken as it is, a model becomes an assistant.  `options` go to the drafter's configuration; with the
    target's `tokenizer` given, an assistant that is loaded is checked to have the same.  Raises `ConfigError` for
    unknown names and options.
    """
    if isinstance(spec, Drafter):
        if options:
            raise ConfigError(
                f"options {sorted(options)} for a drafter that is built already; give them to its constructor"
            )
        return spec
    if isinstance(spec, PreTrainedModel):
        from specdec.hf.assistant import make_assistant

        return make_assistant(spec, model, **options)
    if spec is None:
        return NoDrafter()
    if spec.startswith("adaptive:"):
        return AdaptiveDrafter(make_drafter(spec.removeprefix("adaptive:"), model, tokenizer, **options))
    name, _, addition = spec.partition("+")
    if addition not in ("", "suffix"):
        raise ConfigError(f"drafter={spec!r} is not known; accepted: {', '.join(NAMES)}")
    drafter = _make_one(name, spec, model, tokenizer, options)
    if not addition:
        return drafter
    from specdec.draft.suffix import SuffixDrafter

    return HybridDrafter(drafter, SuffixDrafter())


def lend_prefixes(drafter: Drafter, prefixes: PrefixCache) -> None:
    """Let EAGLE drafters, also inside others, keep the pages of their heads in `prefixes`, unless they have a store."""
    from specdec.draft.eagle import EagleDrafter

    if isinstance(drafter, EagleDrafter) and drafter.prefixes is None:
        drafter.prefixes = prefixes
    if isinstance(drafter, HybridDrafter):
        lend_prefixes(drafter.primary, prefixes)
        lend_prefixes(drafter.secondary, prefixes)
    if isinstance(drafter, AdaptiveDrafter):
        lend_prefixes(drafter.inner, prefixes)


def _make_one(
    name: str, spec: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, options: dict[str, Any]
) -> Drafter:
    kind, _, where = name.partition(":")
    if name == "none":
        return NoDrafter()
    if name == "ngram":
        from specdec.draft.ngram import NGramDrafter

        return NGramDrafter.of(**options)
    if name == "suffix":
        from specdec.draft.suffix import SuffixDrafter

        return SuffixDrafter.of(**options)
    if kind == "assistant" and where:
        from specdec.hf.assistant import load_assistant

        return load_assistant(where, model, tokenizer, **options)
    if kind == "eagle":
        from specdec.hf.eagle import load_eagle_drafter

        return load_eagle_drafter(where or None, model, **options)
    raise ConfigError(f"drafter={spec!r} is not known; accepted: {', '.join(NAMES)}")
