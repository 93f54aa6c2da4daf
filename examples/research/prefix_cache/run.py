"""Two-turn conversations with and without a prefix cache: what is run again, what it costs, that the text is the same.

python examples/research/prefix_cache/run.py --prompts questions.jsonl --output result.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import specdec
from specdec import DeferredWriter, StepRecord
from specdec.bench.provenance import provenance
from specdec.bench.workload import encode_turn, read_questions
from specdec.hf.models import DEFAULT_MODEL, load_model
from specdec.kv.metrics import WriterMetrics, metered
from specdec.kv.prefix import PrefixCache


def answer(
    model: PreTrainedModel, prompt: list[int], store: PrefixCache | None, drafter: Any, new_tokens: int
) -> tuple[list[int], int, float]:
    """The answer, the prompt tokens that were run for it, and the seconds until its first tokens."""
    metrics, records, first = WriterMetrics(), [], []

    def on_step(record: StepRecord) -> None:
        records.append(record)
        first.append(time.perf_counter())

    ids = torch.tensor([prompt], device=model.device)
    start = time.perf_counter()
    output = specdec.generate(
        model,
        ids,
        attention_mask=torch.ones_like(ids),
        drafter=drafter,
        prefix_cache=store,
        writer=metered(DeferredWriter, metrics),
        on_step=on_step,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    run = metrics.rows_committed - sum(record.commit.rows_committed for record in records)
    return output[0, len(prompt) :].tolist(), run, first[0] - start


def main() -> None:
    """Run all conversations both ways and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Hub id, model folder or .gguf file.")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device)
    questions = [q for q in read_questions(arguments.prompts, arguments.limit) if len(q.turns) > 1]
    store = PrefixCache()
    sums = {name: {"prompt_tokens": 0, "run_without": 0, "run_with": 0} for name in ("turn 1", "turn 2")}
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    equal = 0
    for question in questions:
        answers: list[str] = []
        texts: dict[str, list[list[int]]] = {"without": [], "with": []}
        for turn in range(2):
            prompt = encode_turn(tokenizer, question.turns[: turn + 1], answers)
            entry = sums[f"turn {turn + 1}"]
            entry["prompt_tokens"] += len(prompt) - 1
            for name, kept in (("without", None), ("with", store)):
                tokens, run, wait = answer(model, prompt, kept, arguments.drafter, arguments.new_tokens)
                texts[name].append(tokens)
                entry[f"run_{name}"] += run
                if turn == 1:
                    seconds[name].append(wait)
            answers.append(str(tokenizer.decode(texts["without"][-1], skip_special_tokens=True)))
        equal += texts["without"] == texts["with"]
    median = {name: sorted(times)[len(times) // 2] for name, times in seconds.items()}
    result = {
        "settings": {**vars(arguments), "prompts": arguments.prompts.name, "output": None},
        "provenance": provenance(model.device),
        "conversations": len(questions),
        "equal": equal,
        "tokens": sums,
        "turn_2_seconds_to_first_tokens_median": median,
    }
    text = json.dumps(result, indent=1, default=str) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
