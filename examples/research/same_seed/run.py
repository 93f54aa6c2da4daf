"""Does the same seed give the same text, whatever drafts and verifies?

python examples/research/same_seed/run.py --output examples/research/same_seed/result.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import specdec
from specdec.bench.provenance import provenance
from specdec.hf.models import DEFAULT_MODEL, load_model
from specdec.sampling import GeneratorNoise

PROMPTS = (
    "Write two sentences about a lighthouse.",
    "List five fruits, then list them again in reverse order.",
    "Explain to a child why the sky is blue.",
    "Write a short poem about rain.",
    "Give three tips for learning a language.",
    "Repeat this sentence twice: the quick brown fox jumps over the lazy dog.",
    "What is the capital of France, and what is it known for?",
    "Write a Python function that adds two numbers.",
    "Describe a market on a Saturday morning.",
    "Write a polite e-mail that asks for a refund.",
    "Summarise the story of Cinderella in two sentences.",
    "Name a city and say what one can do there on a rainy day.",
)

WAYS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram"},
    "suffix": {"drafter": "suffix"},
    "suffix, vectorized": {"drafter": "suffix", "verifier": "vectorized"},
    "suffix, direct writer": {"drafter": "suffix", "writer": "direct"},
    "eagle": {"drafter": "eagle"},
    "eagle+suffix": {"drafter": "eagle+suffix"},
}
"""Ways of `specdec.generate`, each to be compared with `model.generate`."""


def encoded(tokenizer: PreTrainedTokenizerBase, prompt: str) -> dict[str, Tensor]:
    messages = [{"role": "user", "content": prompt}]
    return dict(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    )


def ways_of(model: PreTrainedModel, wanted: list[str]) -> dict[str, Callable[..., Tensor]]:
    """Every way of decoding by name, the two of transformers' own first."""
    found: dict[str, Callable[..., Tensor]] = {
        "hf again": model.generate,
        "hf prompt lookup": lambda **options: model.generate(prompt_lookup_num_tokens=5, **options),
    }
    for name in wanted:
        found[name] = lambda name=name, **options: specdec.generate(model, **WAYS[name], **options)
    return found


@torch.no_grad()
def gap(model: PreTrainedModel, ids: list[int], tokens: tuple[int, int], temperature: float, noise: Tensor) -> float:
    """How nearly the race between two tokens behind `ids` was a tie: the difference of their log(p / e), or of their
    logits when greedy.  Computed in one forward over all of `ids`, so good to a rounding error only."""
    logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1].float()
    scores = logits if temperature == 0 else logits / temperature - noise.log()
    return abs(float(scores[tokens[0]] - scores[tokens[1]]))


def compare(
    model: PreTrainedModel, inputs: dict[str, Tensor], way: Callable[..., Tensor], seed: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Whether one way gives the tokens of `model.generate` for one seed, and where they part."""
    torch.manual_seed(seed)
    noise = GeneratorNoise(torch.get_rng_state(), 1, model.config.vocab_size, torch.device("cpu"))
    expected = model.generate(**inputs, **options)[0].tolist()
    torch.manual_seed(seed)
    found = way(**inputs, **options)[0].tolist()
    length = inputs["input_ids"].shape[1]
    if found == expected:
        return {"same": True}
    pairs = enumerate(zip(found, expected, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))
    result: dict[str, Any] = {"same": False, "parted_at": place - length, "gap": None}
    if place < min(len(found), len(expected)):
        tokens, index = (found[place], expected[place]), place - length
        result["gap"] = gap(model, expected[:place], tokens, options.get("temperature", 0.0), noise.at(index)[0])
    return result


def main() -> None:
    """Compare all ways with `model.generate` on all prompts, greedy and sampled, in each dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub id, model folder or .gguf file")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--temperatures", default="0,0.7,1.2")
    parser.add_argument("--ways", default="|".join(WAYS), help="names with | between them")
    parser.add_argument("--limit", type=int, default=len(PROMPTS), help="first so many prompts")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    found = []
    for dtype in arguments.dtypes.split(","):
        model, tokenizer = load_model(arguments.model, dtype=dtype)
        ways = ways_of(model, arguments.ways.split("|"))
        for temperature in map(float, arguments.temperatures.split(",")):
            options: dict[str, Any] = {"max_new_tokens": arguments.new_tokens, "do_sample": temperature > 0}
            if temperature > 0:
                options |= {"temperature": temperature, "top_k": 0, "top_p": 0.95}
            for name, way in ways.items():
                results = [
                    compare(model, encoded(tokenizer, prompt), way, seed, options)
                    for seed, prompt in enumerate(PROMPTS[: arguments.limit])
                ]
                partings = [result for result in results if not result["same"]]
                found.append(
                    {
                        "dtype": dtype,
                        "temperature": temperature,
                        "way": name,
                        "texts": len(results),
                        "same": len(results) - len(partings),
                        "parted_at": [result["parted_at"] for result in partings],
                        "gaps": [None if r["gap"] is None else round(r["gap"], 4) for r in partings],
                    }
                )
                print(f"{dtype} T={temperature:g} {name}: {found[-1]['same']} of {len(results)} texts are the same")
    if arguments.output is not None:
        settings = {key: value for key, value in vars(arguments).items() if key != "output"}
        whole = {"settings": settings, **provenance(model.device), "results": found}
        arguments.output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
