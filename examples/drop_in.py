"""A script that was written for `model.generate`, and the argument that makes it speculative.

All but the marked line is plain transformers: loading, sampling settings, a logits processor.

    python examples/drop_in.py --plain      # as it was
    python examples/drop_in.py              # the same text, in fewer forwards
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import specdec
from specdec.hf.models import find_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--plain", action="store_true", help="use transformers' own decoding")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()

    location = find_source(arguments.model).location
    tokenizer = AutoTokenizer.from_pretrained(location)
    model = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32)
    inputs = tokenizer("Three things that a lighthouse keeper needs:\n1.", return_tensors="pt")

    torch.manual_seed(0)
    more = {}
    if not arguments.plain:
        more["custom_generate"] = specdec.custom_generate(drafter="suffix")  # <- the only change
    output = model.generate(
        **inputs,
        max_new_tokens=arguments.max_new_tokens,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.1)]),
        **more,
    )
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
