"""A chat in the terminal.  Each answer streams as it comes, and the drafter remembers what was said.

python examples/streaming_chat.py
"""

import argparse
import sys

from transformers import TextStreamer

import specdec
from specdec.draft.suffix import SuffixDrafter
from specdec.hf.models import DEFAULT_MODEL, load_model
from specdec.stats import SpecStats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    arguments = parser.parse_args()

    model, tokenizer = load_model(arguments.model)
    # One drafter for the whole chat: it searches earlier answers too.
    drafter = SuffixDrafter.of(memory_tokens=20_000)
    messages = []
    print("Say something; an empty line ends the chat.", file=sys.stderr)
    while (line := read_line()) != "":
        messages.append({"role": "user", "content": line})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        records = []
        output = specdec.generate(
            model,
            **inputs,
            drafter=drafter,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            on_step=records.append,
            max_new_tokens=arguments.max_new_tokens,
            do_sample=False,
        )
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        print(f"[τ {SpecStats.of(records).tau:.2f}]", file=sys.stderr)


def read_line() -> str:
    """The next line of the user; empty at the end of the input."""
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


if __name__ == "__main__":
    main()
