"""Answer one prompt speculatively, and check that `model.generate` says the same.

python examples/quickstart.py "Write the numbers from one to ten as words, twice."
"""

import argparse

import specdec
from specdec.hf.models import DEFAULT_MODEL, load_model
from specdec.stats import SpecStats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Write the numbers from one to ten as words, twice.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub id, model folder or .gguf file")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()

    model, tokenizer = load_model(arguments.model, dtype="fp32")
    messages = [{"role": "user", "content": arguments.prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    options = dict(max_new_tokens=arguments.max_new_tokens, do_sample=False)

    records = []
    output = specdec.generate(model, **inputs, drafter=arguments.drafter, on_step=records.append, **options)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    stats = SpecStats.of(records)
    print(f"\n{stats.emitted} tokens in {stats.rounds} forwards, τ {stats.tau:.2f}, acceptance {stats.acceptance:.0%}")
    same = output.tolist() == model.generate(**inputs, **options).tolist()
    print("model.generate() gives the same tokens" if same else "model.generate() gives OTHER tokens")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
