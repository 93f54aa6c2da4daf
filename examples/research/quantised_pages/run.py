"""Quantised pages on a real model: is speculation still plain decoding, what is lost, what is saved?

python examples/research/quantised_pages/run.py --prompts questions.jsonl --output result.json
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import specdec
from specdec import DeferredWriter, HFTarget, PagedKVCache, SpecConfig, StepRecord, Verdict, Window
from specdec.bench.measure import first_difference, top_2_gap
from specdec.bench.provenance import provenance
from specdec.bench.workload import encode_turn, read_questions
from specdec.draft.scripted import SyntheticDrafter
from specdec.hf.models import DEFAULT_MODEL, load_model

KINDS = (None, "fp8_e4m3", "int8")


def identity(
    model: PreTrainedModel, prompts: list[list[int]], kind: str, drafter: str, new_tokens: int
) -> dict[str, Any]:
    """Prompts whose speculative text is that of plain decoding over the same pages; where it is not, the index of the
    first other token and the difference of the two largest logits there (without quantisation)."""
    accepted, divergences = 0, []
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=model.device)
        options: dict[str, Any] = dict(
            attention_mask=torch.ones_like(ids),
            spec_config=SpecConfig(kv_dtype=kind),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        records: list[StepRecord] = []
        plain = specdec.generate(model, ids, drafter="none", **options)[0, len(prompt) :].tolist()
        told: Any = drafter
        if drafter == "synthetic":
            vocab = model.config.get_text_config().vocab_size
            told = SyntheticDrafter([plain], vocab, depth=6, siblings=1, acceptance=0.8)
        other = specdec.generate(model, ids, drafter=told, on_step=records.append, **options)[0, len(prompt) :].tolist()
        accepted += sum(record.num_accepted for record in records)
        index = first_difference(other, plain)
        if index is not None:
            gap = top_2_gap(model, ids, plain[:index])
            divergences.append({"prompt": number, "index": index, "top_2_gap": round(gap, 4)})
    equal = len(prompts) - len(divergences)
    return {"prompts": len(prompts), "equal": equal, "accepted_drafts": accepted, "divergences": divergences}


@torch.no_grad()
def logits_over(target: HFTarget, text: list[int], kind: str | None, chunk: int) -> Tensor:
    """Log-probabilities at every position of a text that is run in chunks, so that all but the first read pages."""
    cache = PagedKVCache(target.layers, len(text) // 16 + 1, 16, kv_dtype=kind)
    writer, row = DeferredWriter(cache), cache.add_row()
    parts = []
    for start in range(0, len(text), chunk):
        window = Window.chain([text[start : start + chunk]], (row,), (start,), target.device)
        writer.begin(window)
        output = target.forward(window, writer)
        writer.commit(Verdict.keep_all(window, window.tokens[:, 0]))
        assert output.logits is not None
        parts.append(output.logits[0].float().log_softmax(-1))
    return torch.cat(parts)


def quality(target: HFTarget, texts: list[list[int]], chunk: int) -> dict[str, Any]:
    """Perplexity of each kind of page, and how far its predictions are from those over unquantised pages."""
    sums: dict[str, dict[str, float]] = {str(kind): {"nll": 0.0, "kl": 0.0, "same_top": 0.0} for kind in KINDS}
    count = 0
    for text in texts:
        ids = torch.tensor(text, device=target.device)
        reference = logits_over(target, text, None, chunk)
        count += len(text) - 1
        for kind in KINDS:
            found = reference if kind is None else logits_over(target, text, kind, chunk)
            entry = sums[str(kind)]
            entry["nll"] -= float(found[:-1].gather(1, ids[1:, None]).sum())
            entry["kl"] += float((reference.exp() * (reference - found)).sum(-1)[:-1].sum())
            entry["same_top"] += float((reference.argmax(-1) == found.argmax(-1))[:-1].sum())
    return {
        kind: {
            "perplexity": math.exp(entry["nll"] / count),
            "mean_kl": entry["kl"] / count,
            "same_top_token": entry["same_top"] / count,
            "bytes_per_token": PagedKVCache(
                target.layers, 1, kv_dtype=None if kind == "None" else kind
            ).bytes_per_token,
        }
        for kind, entry in sums.items()
    }


def texts_of(model: PreTrainedModel, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Prompts with the model's own answers: text of the kind that will be decoded."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        output = specdec.generate(
            model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, pad_token_id=0
        )
        texts.append(output[0].tolist())
    return texts


def main() -> None:
    """Run both parts and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Hub id, model folder or .gguf file.")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--text-tokens", type=int, default=192)
    parser.add_argument("--drafter", default="synthetic", help="synthetic: trees with right drafts.")
    parser.add_argument("--quality-dtype", default="bf16", help="Type of the pages that quality is compared with.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model, dtype="fp32", device=arguments.device)
    questions = read_questions(arguments.prompts, arguments.limit)
    prompts = [encode_turn(tokenizer, question.turns[:1], ()) for question in questions]
    result: dict[str, Any] = {"settings": {**vars(arguments), "prompts": arguments.prompts.name, "output": None}}
    result["provenance"] = provenance(model.device)
    texts = texts_of(model, prompts[: arguments.texts], arguments.text_tokens)
    result["identity"] = {}
    for name in ("fp32", "fp64"):
        exact = model.to(torch.float64 if name == "fp64" else torch.float32)
        result["identity"][name] = {
            kind: identity(exact, prompts, kind, arguments.drafter, arguments.new_tokens) for kind in KINDS if kind
        }
    model, _ = load_model(arguments.model, dtype=arguments.quality_dtype, device=arguments.device)
    result["quality"] = quality(HFTarget(model), texts, chunk=16)
    text = json.dumps(result, indent=1, default=str) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
