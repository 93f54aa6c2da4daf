"""Summarise several texts in one batch.  Summaries quote their source, which lookup drafters like.

python examples/batch_summaries.py report.txt minutes.txt
"""

import argparse
from pathlib import Path

import specdec
from specdec.hf.models import DEFAULT_MODEL, load_model
from specdec.stats import SpecStats

SAMPLES = (
    "The harbour council met on Tuesday. It decided to repair the old pier before winter. The repair will cost less "
    "than a new pier, and the ferry can run during the work. The council will meet again in March.",
    "Heavy rain closed the road between the mill and the upper village. Two families stayed with neighbours over "
    "night. The road was open again on Friday. The mayor thanked the volunteers who cleared it.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="texts; without any, two samples are summarised")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args()

    texts = [path.read_text(encoding="utf-8") for path in arguments.files] or list(SAMPLES)
    model, tokenizer = load_model(arguments.model)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    chats = [[{"role": "user", "content": f"Summarise this text in one or two sentences.\n\n{text}"}] for text in texts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    ).to(model.device)

    records = []
    output = specdec.generate(
        model,
        **inputs,
        drafter=arguments.drafter,
        on_step=records.append,
        max_new_tokens=arguments.max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    for row in output[:, inputs["input_ids"].shape[1] :]:
        print("-", tokenizer.decode(row, skip_special_tokens=True).strip())
    stats = SpecStats.of(records)
    print(f"\n{len(texts)} texts, {stats.emitted} tokens in {stats.rounds} forwards, τ {stats.tau:.2f} for each text")


if __name__ == "__main__":
    main()
