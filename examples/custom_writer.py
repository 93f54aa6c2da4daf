"""A writer of one's own: it wraps another and counts what each window wrote, and what it would have written at once.

python examples/custom_writer.py
"""

import argparse
from collections import Counter

import specdec
from specdec import DeferredWriter, DirectWriter, KVWriter
from specdec.hf.models import DEFAULT_MODEL, load_model


class CountingWriter(KVWriter):
    """Passes everything on to `writer`, and adds up rows and bytes."""

    def __init__(self, writer: KVWriter, totals: Counter) -> None:
        self.writer = writer
        self.totals = totals

    def begin(self, window):
        self.writer.begin(window)

    def stage(self, layer, k, v):
        return self.writer.stage(layer, k, v)

    def commit(self, verdict):
        stats = self.writer.commit(verdict)
        self.totals.update(
            windows=1, staged=stats.rows_staged, committed=stats.rows_committed, bytes=stats.bytes_written
        )
        return stats

    def abort(self):
        self.totals.update(aborted=1)
        self.writer.abort()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()

    model, tokenizer = load_model(arguments.model, dtype="fp32")
    inputs = tokenizer("One green bottle, two green bottles, three", return_tensors="pt").to(model.device)
    outputs = []
    for kind in (DeferredWriter, DirectWriter):
        totals: Counter = Counter()
        outputs.append(
            specdec.generate(
                model,
                **inputs,
                writer=lambda cache, kind=kind, totals=totals: CountingWriter(kind(cache), totals),
                max_new_tokens=arguments.max_new_tokens,
                do_sample=False,
            ).tolist()
        )
        print(
            f"{kind.__name__}: {totals['windows']} windows, {totals['staged']} rows staged, "
            f"{totals['committed']} committed, {totals['bytes']:,} bytes written"
        )
    assert outputs[0] == outputs[1]


if __name__ == "__main__":
    main()
