"""Tokens as text: what each adds to the text, and a short form in which nothing is invisible."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

SYMBOLS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "↵"}

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens comes with its last one, an incomplete one at
    the end with the last token of all."""
    found: list[str] = []
    # Text is decoded from a few tokens back, since what a token looks like may depend on those before it.
    start, shown = 0, 0
    for end in range(1, len(tokens) + 1):
        before, now = (text_of(tokenizer, tokens[start:stop]) for stop in (shown, end))
        if now.endswith(REPLACEMENT) and end < len(tokens):
            found.append("")
            continue
        found.append(now[len(before) :])
        start, shown = shown, end
    return found


def label(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The token alone, in visible characters."""
    return visible(text_of(tokenizer, [token]))


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The tokens as text, special ones included."""
    return str(tokenizer.decode(list(tokens)))


def visible(text: str) -> str:
    """Text with spaces and line ends shown as symbols, and other characters without a shape as escapes."""
    return "".join(SYMBOLS.get(char) or (char if char.isprintable() else escape(char)) for char in text)


def harmless(text: str) -> str:
    """Text without characters that would upset a page: controls, and those that turn the direction of writing."""
    return "".join(char if char in "\n\t" or not disturbs(char) else REPLACEMENT for char in text)


def disturbs(char: str) -> bool:
    """Whether a character is a control, a direction mark, a surrogate, or none at all."""
    return unicodedata.category(char) in ("Cc", "Cs", "Cn", "Co") or unicodedata.bidirectional(char) in (
        *("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"),
    )


def escape(char: str) -> str:
    """A character's code point."""
    return f"\\u{{{ord(char):x}}}"
