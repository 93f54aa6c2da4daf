"""JSON of a given form, by a logits processor with state: a small automaton over characters.

specdec runs processors once for each emitted token, in order; so the automaton stays in step with the text, and drafts
that it forbids are rejected.

    python examples/structured_json.py
"""

import argparse
import json
import string

import torch
from transformers import LogitsProcessor, LogitsProcessorList

import specdec
from specdec.hf.models import DEFAULT_MODEL, load_model
from specdec.stats import SpecStats

LETTERS = frozenset(string.ascii_letters + " ")
DIGITS = frozenset(string.digits)


class Form:
    """`{"name": "...", "age": N}` and the like, as a row of places; each allows some characters.

    A place is one fixed character, or a run of at least one and at most `limit` characters of a set.
    """

    def __init__(self, fields: dict[str, tuple[frozenset[str], int, str]]) -> None:
        self.places: list[tuple[frozenset[str], int]] = []
        self._fixed("{")
        for i, (name, (allowed, limit, quote)) in enumerate(fields.items()):
            self._fixed((", " if i else "") + json.dumps(name) + ": " + quote)
            self.places.append((allowed, limit))
            self._fixed(quote)
        self._fixed("}")

    def _fixed(self, text: str) -> None:
        self.places += [(frozenset(char), 1) for char in text]

    def advance(self, state: tuple[int, int], char: str) -> tuple[int, int] | None:
        """The state `(place, characters of it)` behind one more character; None where it is not allowed."""
        place, count = state
        if place < len(self.places) and char in self.places[place][0] and count < self.places[place][1]:
            return place, count + 1
        if count > 0 and place + 1 < len(self.places) and char in self.places[place + 1][0]:
            return place + 1, 1
        return None

    def is_complete(self, state: tuple[int, int]) -> bool:
        """Whether the text may end here."""
        return state[0] == len(self.places) - 1 and state[1] > 0


class FormProcessor(LogitsProcessor):
    """Allows the tokens that the form allows next.  For one row; made anew for each generation."""

    def __init__(self, form: Form, texts: list[str], end: int, prompt_length: int) -> None:
        self.form, self.texts, self.end = form, texts, end
        self.read = prompt_length
        self.state: tuple[int, int] = (0, 0)
        self.allowed: dict[tuple[int, int], list[int]] = {}

    def __call__(self, input_ids, scores):
        for token in input_ids[0, self.read :].tolist():
            following = self.follow(self.state, self.texts[token])
            if following is not None:  # None: the end of the text, behind which nothing matters
                self.state = following
        self.read = input_ids.shape[1]
        if self.state not in self.allowed:
            fits = [i for i, text in enumerate(self.texts) if text and self.follow(self.state, text) is not None]
            self.allowed[self.state] = [*fits, self.end] if self.form.is_complete(self.state) else fits
        tokens = self.allowed[self.state]
        masked = torch.full_like(scores, float("-inf"))
        masked[:, tokens] = scores[:, tokens]
        return masked

    def follow(self, state, text):
        for char in text:
            state = self.form.advance(state, char)
            if state is None:
                return None
        return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    arguments = parser.parse_args()

    model, tokenizer = load_model(arguments.model, dtype="fp32")
    end = tokenizer.eos_token_id
    texts = ["" if i == end else tokenizer.decode([i]) for i in range(model.config.vocab_size)]
    form = Form({"name": (LETTERS, 12, '"'), "city": (LETTERS, 12, '"'), "age": (DIGITS, 2, "")})
    prompt = 'A person as JSON. Example: {"name": "Ada", "city": "London", "age": 36}. Another: '
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].shape[1]

    def run(generate, **more):
        processors = LogitsProcessorList([FormProcessor(form, texts, end, length)])
        return generate(**inputs, logits_processor=processors, max_new_tokens=80, do_sample=False, **more)

    records = []
    output = run(lambda **options: specdec.generate(model, **options), on_step=records.append)
    assert output.tolist() == run(model.generate).tolist()
    text = tokenizer.decode(output[0, length:], skip_special_tokens=True)
    print(json.loads(text))
    stats = SpecStats.of(records)
    print(f"{stats.emitted} tokens in {stats.rounds} forwards, τ {stats.tau:.2f}")


if __name__ == "__main__":
    main()
