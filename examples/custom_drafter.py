"""A drafter of one's own: it knows a list of phrases, and drafts how one goes on as soon as it has begun.

Useful where answers are full of set phrases: forms, logs, legal text.

    python examples/custom_drafter.py
"""

import argparse

import specdec
from specdec import Draft, Drafter
from specdec.hf.models import DEFAULT_MODEL, load_model
from specdec.stats import SpecStats


class PhraseDrafter(Drafter):
    """Drafts the rest of every known phrase that the text has just begun, as one tree."""

    def __init__(self, phrases: list[list[int]], begun: int = 2) -> None:
        """`begun`: tokens of a phrase that must stand at the end of the text before it is drafted."""
        self.phrases = phrases
        self.begun = begun

    @property
    def taps(self):
        return ()

    def begin(self, prompts, max_length):
        pass

    def fork(self, source, copies):
        pass

    def propose(self, context):
        limits = zip(context.tokens, context.max_nodes, context.max_depths, strict=True)
        return Draft.trees([self.tree(*row) for row in limits], context.roots.device)

    def observe(self, window, features, verdict):
        pass

    def end(self):
        pass

    def tree(self, tokens, max_nodes, max_depth):
        nodes, index_of = [], {}
        for rest in self.continuations(list(tokens)):
            parent = 0
            for token in rest[:max_depth]:
                if (parent, token) not in index_of:
                    if len(nodes) == max_nodes:
                        return nodes
                    nodes.append((token, parent))
                    index_of[parent, token] = len(nodes)
                parent = index_of[parent, token]
        return nodes

    def continuations(self, tokens):
        """What is left of each phrase whose beginning stands at the end of the text, longest beginnings first."""
        found = []
        for phrase in self.phrases:
            for size in range(len(phrase) - 1, self.begun - 1, -1):
                if tokens[-size:] == phrase[:size]:
                    found.append((size, phrase[size:]))
                    break
        return [rest for _, rest in sorted(found, key=lambda pair: -pair[0])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args()

    model, tokenizer = load_model(arguments.model, dtype="fp32")
    inputs = tokenizer("Dear Sir or Madam,\n\n", return_tensors="pt").to(model.device)
    options = dict(max_new_tokens=arguments.max_new_tokens, do_sample=False)
    expected = model.generate(**inputs, **options)
    # For the demonstration the phrases are sentences of the very letter that the model writes.
    letter = tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    sentences = [sentence for sentence in letter.split(".") if sentence.strip()]
    phrases = [tokenizer(sentence, add_special_tokens=False)["input_ids"] for sentence in sentences]

    records = []
    output = specdec.generate(model, **inputs, drafter=PhraseDrafter(phrases), on_step=records.append, **options)
    assert output.tolist() == expected.tolist()
    print(letter)
    stats = SpecStats.of(records)
    print(f"\n{stats.emitted} tokens in {stats.rounds} forwards, τ {stats.tau:.2f}")


if __name__ == "__main__":
    main()
