"""What `specdec generate` shows on a terminal: text as it comes."""

from __future__ import annotations

import sys
from typing import TextIO, final

from rich.console import Console
from rich.text import Text
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from specdec.errors import UnsupportedError
from specdec.types import StepRecord

STYLES = {"accepted": "green", "bonus": "cyan", "plain": "yellow"}
"""How a token came: drafted and accepted, given on top of accepted drafts, or by a step without any."""


@final
class TextOutput:
    """Writes the text of one generation as its steps come; `on_step` for `specdec.generate`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show_acceptance: bool = False) -> None:
        """Raises `UnsupportedError` for tokenizers that cannot decode token by token."""
        if not tokenizer.is_fast:
            raise UnsupportedError(f"{type(tokenizer).__name__} cannot decode token by token; use --json")
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""
        self._stream = DecodeStream(skip_special_tokens=True)
        self._coloured = show_acceptance
        self._out: TextIO = sys.stdout
        self._console = Console(file=self._out, soft_wrap=True, highlight=False)
        self.counts = dict.fromkeys(STYLES, 0)

    def __call__(self, record: StepRecord) -> None:
        tokens, accepted = record.emitted[0], len(record.accepted_nodes[0])
        kinds = ["accepted"] * accepted + ["bonus" if accepted else "plain"]
        for token, kind in zip(tokens, kinds, strict=True):
            self.counts[kind] += 1
            self._tokens.append(token)
            piece = self._stream.step(self._tokenizer.backend_tokenizer, token)
            if piece:
                self._write(piece, kind)
        self._out.flush()

    def end(self) -> None:
        """Write what waited for the rest of a character, end the last line, and say what the colours mean."""
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        if text.startswith(self._shown):
            self._write(text[len(self._shown) :], "plain")
        self._out.write("\n")
        if self._coloured:
            legend = [Text(f"{kind} {count}", STYLES[kind]) for kind, count in self.counts.items()]
            self._console.print(Text(" · ").join(legend))

    def _write(self, piece: str, kind: str) -> None:
        self._shown += piece
        if self._console.is_terminal:
            piece = "".join(
                char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in piece
            )
        if self._coloured:
            self._console.print(Text(piece, STYLES[kind]), end="")
        else:
            self._out.write(piece)
