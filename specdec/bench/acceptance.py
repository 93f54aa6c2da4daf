"""τ of a head on given prompts: the target writes once, and every setting is measured along that text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from specdec.draft.eagle_head import EagleHead
from specdec.hf.lockstep import LockstepModel
from specdec.hf.teacher import TeacherModel
from specdec.train.acceptance import Tau, Texts, chain_acceptance, tau_along, tree_acceptance
from specdec.train.data import first_replies
from specdec.train.selftalk import Pick, Rows, SelfTalkConfig, talk


@dataclass(frozen=True)
class Setting:
    """One way of drafting."""

    name: str
    depth: int
    size: int | None = None
    """Nodes of a tree, the root included; None: a chain."""
    top_k: int = 1


CHAINS = tuple(Setting(f"chain {depth}", depth) for depth in range(1, 9))


def trees(sizes: Sequence[int] = (8, 16, 32, 60), depth: int = 6, top_k: int = 8) -> tuple[Setting, ...]:
    """Settings of dynamic trees."""
    return tuple(Setting(f"tree {size}", depth, size, top_k) for size in sizes)


def replies(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    end_ids: Sequence[int],
    pick: Pick,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    rows_at_once: int = 16,
) -> Iterator[Rows]:
    """What the model answers, a few prompts of like length at a time; greedy at temperature 0."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for first in range(0, len(order), rows_at_once):
        openings = [prompts[i] for i in order[first : first + rows_at_once]]
        length = max(map(len, openings)) + max_new_tokens
        config = SelfTalkConfig(
            length=length,
            reply_temperature=temperature or 1.0,
            greedy_share=0.0 if temperature else 1.0,
            min_p=0.0,
            max_reply_tokens=max_new_tokens,
        )
        step = LockstepModel(model, len(openings), length).step
        yield talk(step, pick, openings, None, end_ids, config, seed + first, model.device, starts_with_reply=True)


def texts_of(rows: Rows, teacher: TeacherModel, rows_at_once: int = 8) -> Iterator[Texts]:
    """The rows with the target's features, a few at a time."""
    start, end = first_replies(rows)
    for first in range(0, len(rows.tokens), rows_at_once):
        part = slice(first, first + rows_at_once)
        tokens = rows.tokens[part, : int(end[part].max())].long()
        yield Texts(tokens, teacher(tokens)[0], start[part], end[part])


def measure(
    head: EagleHead,
    texts: Sequence[Texts],
    settings: Sequence[Setting],
    on_setting: Callable[[str], None] = lambda name: None,
) -> dict[str, Tau]:
    """τ of each setting over all texts."""
    result = {}
    chains = [s for s in settings if s.size is None]
    if chains:
        deepest = max(s.depth for s in chains)
        tables = [chain_acceptance(head, part, deepest) for part in texts]
        for setting in chains:
            on_setting(setting.name)
            result[setting.name] = joined([tau_along(t, p, setting.depth) for t, p in zip(tables, texts, strict=True)])
    shapes = sorted({(s.depth, s.top_k) for s in settings if s.size is not None})
    for depth, top_k in shapes:
        members = [s for s in settings if s.size is not None and (s.depth, s.top_k) == (depth, top_k)]
        sizes = [s.size for s in members if s.size is not None]
        grown: list[dict[int, Int[Tensor, "b t"]]] = [tree_acceptance(head, p, depth, top_k, sizes) for p in texts]
        for setting in members:
            assert setting.size is not None
            on_setting(setting.name)
            along = [tau_along(t[setting.size], p, depth) for t, p in zip(grown, texts, strict=True)]
            result[setting.name] = joined(along)
    return result


def joined(parts: Sequence[Tau]) -> Tau:
    """One figure for several batches of texts; positions are weighted by how often they were reached."""
    steps, texts = sum(p.steps for p in parts), sum(p.texts for p in parts)
    emitted = sum(p.tau * p.steps for p in parts)
    reached = [sum(column) for column in zip(*(p.reached for p in parts), strict=True)]
    passed = [sum(column) for column in zip(*(p.passed for p in parts), strict=True)]
    mean = sum(p.mean_of_texts * p.texts for p in parts) / max(texts, 1)
    return Tau(emitted / max(steps, 1), mean, steps, texts, tuple(reached), tuple(passed))
