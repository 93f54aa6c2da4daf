"""`trace`: generate a text and keep how it came about."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import specdec
from specdec.config import require_int
from specdec.errors import ConfigError, choose
from specdec.hf.generate import generate
from specdec.kv.pages import PagedKVCache
from specdec.kv.writer import KVWriter
from specdec.policies import WRITERS, MakeWriter
from specdec.stats import SpecStats
from specdec.trace.labels import label, pieces
from specdec.trace.report import Candidate, EmittedToken, Node, TracedStep, TraceReport
from specdec.types import StepRecord


def trace(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Tensor,
    *,
    top: int = 5,
    writer: str | MakeWriter = "deferred",
    facts: dict[str, str] | None = None,
    **arguments: Any,
) -> TraceReport:
    """Generate for one prompt and report every token and every step.

    Args:
        prompt: text, taken as it stands, or token ids `[1 t]`.
        top: candidates kept for each token.
        facts: what else the report should say about how it came about.
        arguments: everything else that `specdec.generate` takes.

    The scores of every token are held until the end: vocabulary × tokens × 4 bytes.
    """
    require_int("top", top, 1, None)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"] if isinstance(prompt, str) else prompt
    if ids.dim() != 2 or len(ids) != 1:
        raise ConfigError(f"prompt of shape {tuple(ids.shape)}; accepted: one prompt, [1, tokens]")
    ids = ids.to(model.device)
    watch = _Watch(choose("writer", writer, WRITERS) if isinstance(writer, str) else writer)
    output: Any = generate(
        model,
        ids,
        **{"attention_mask": torch.ones_like(ids), **arguments},
        writer=watch.make_writer,
        on_step=watch.see,
        return_dict_in_generate=True,
        output_scores=True,
    )
    labels = _Labels(tokenizer)
    probs = [scores[0].softmax(-1) for scores in output.scores]
    steps = _steps(watch, probs, labels)
    new_tokens = output.sequences[0, ids.shape[1] :].tolist()
    return TraceReport(
        facts={**_facts(model, writer, arguments), **(facts or {})},
        prompt=tuple(pieces(tokenizer, ids[0].tolist())),
        tokens=tuple(_tokens(tokenizer, new_tokens, watch.records, steps, probs, labels, top)),
        steps=tuple(steps),
        page_size=watch.page_size,
        stats=SpecStats.of(watch.records),
    )


@dataclass
class _Watch:
    """Sees the records of a run, and the pages as each step leaves them."""

    factory: MakeWriter
    records: list[StepRecord] = field(default_factory=list)
    pages: list[tuple[int, ...]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    page_size: int = 0
    _cache: PagedKVCache | None = None

    def make_writer(self, cache: PagedKVCache) -> KVWriter:
        self._cache, self.page_size = cache, cache.page_size
        return self.factory(cache)

    def see(self, record: StepRecord) -> None:
        assert self._cache is not None
        self.records.append(record)
        self.pages.append(self._cache.pages_of(0))
        self.lengths.append(self._cache.length(0))


class _Labels:
    """Labels of tokens, each made once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = label(self._tokenizer, token)
        return self._known[token]


def _steps(watch: _Watch, probs: Sequence[Float[Tensor, " v"]], labels: _Labels) -> list[TracedStep]:
    steps: list[TracedStep] = []
    first = 0
    for record, pages, length in zip(watch.records, watch.pages, watch.lengths, strict=True):
        [emitted] = record.emitted
        steps.append(
            TracedStep(
                index=record.index,
                root=labels.of(record.roots[0]),
                nodes=tuple(_nodes(record, probs[first : first + len(emitted)], labels)),
                first_token=first,
                num_tokens=len(emitted),
                context_length=length - record.commit.rows_committed,
                pages=pages,
                rows_staged=record.commit.rows_staged,
                rows_committed=record.commit.rows_committed,
                bytes_written=record.commit.bytes_written,
                commit_path=record.commit.commit_path,
                timings_ms=dict(record.timings_ms),
                notes=dict(record.notes),
            )
        )
        first += len(emitted)
    return steps


def _nodes(record: StepRecord, probs: Sequence[Float[Tensor, " v"]], labels: _Labels) -> list[Node]:
    [tokens], [parents], [accepted] = record.draft_tokens, record.draft_parents, record.accepted_nodes
    visited = {node: place for place, node in enumerate([0, *accepted])}
    depths = [0]
    nodes = []
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        depths.append(depths[parent] + 1)
        probability = float(probs[visited[parent]][token]) if parent in visited else None
        nodes.append(Node(token, labels.of(token), parent, depths[i], i in accepted, probability))
    return nodes


def _tokens(
    tokenizer: PreTrainedTokenizerBase,
    new_tokens: list[int],
    records: Sequence[StepRecord],
    steps: Sequence[TracedStep],
    probs: Sequence[Float[Tensor, " v"]],
    labels: _Labels,
    top: int,
) -> list[EmittedToken]:
    texts = pieces(tokenizer, new_tokens)
    tokens = []
    for record, step in zip(records, steps, strict=True):
        path = [0, *record.accepted_nodes[0]]
        for depth, token in enumerate(record.emitted[0], start=1):
            index = step.first_token + depth - 1
            best = probs[index].topk(min(top, len(probs[index])))
            candidates = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            drafted = [node for node in step.nodes if node.parent == path[depth - 1] and node.token != token]
            is_accepted = depth < len(path)
            tokens.append(
                EmittedToken(
                    token=token,
                    text=texts[index],
                    label=labels.of(token),
                    kind="accepted" if is_accepted else "bonus" if len(path) > 1 else "plain",
                    depth=depth,
                    step=record.index,
                    probability=float(probs[index][token]),
                    top=tuple(Candidate(other, labels.of(other), share) for other, share in candidates),
                    rejected=tuple(Candidate(node.token, node.label, node.probability or 0.0) for node in drafted),
                )
            )
    return tokens


def _facts(model: PreTrainedModel, writer: str | MakeWriter, arguments: dict[str, Any]) -> dict[str, str]:
    named: dict[str, Any] = {"writer": writer}
    for part in ("drafter", "verifier"):
        named[part] = arguments.get(part, inspect.signature(generate).parameters[part].default)
    return {
        "model": model.config.name_or_path or type(model).__name__,
        **{part: name if isinstance(name, str) else _name_of(name) for part, name in named.items()},
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "specdec": specdec.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": platform.python_version(),
    }


def _name_of(part: object) -> str:
    if part is None:
        return "none"
    return str(getattr(part, "__name__", type(part).__name__))
