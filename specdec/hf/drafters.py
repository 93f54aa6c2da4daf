"""Drafters by name."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.draft.base import Drafter
from specdec.draft.none import NoDrafter
from specdec.errors import ConfigError

NAMES = ("none", "ngram", "suffix", "assistant:MODEL", "eagle", "eagle:PATH", "eagle+suffix", "eagle:PATH+suffix")


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
    name, _, addition = spec.partition("+")
    if addition not in ("", "suffix"):
        raise ConfigError(f"drafter={spec!r} is not known; accepted: {', '.join(NAMES)}")
    drafter = _make_one(name, spec, model, tokenizer, options)
    if not addition:
        return drafter
    from specdec.draft.hybrid import HybridDrafter
    from specdec.draft.suffix import SuffixDrafter

    return HybridDrafter(drafter, SuffixDrafter())


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
