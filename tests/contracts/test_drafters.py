"""What every drafter promises, over random lives of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.draft.assistant import AssistantDrafter
from specdec.draft.base import Drafter
from specdec.draft.hybrid import HybridDrafter
from specdec.draft.ngram import NGramDrafter
from specdec.draft.none import NoDrafter
from specdec.draft.scripted import AlwaysWrongDrafter, ScriptedDrafter, SyntheticDrafter
from specdec.draft.suffix import SuffixDrafter
from specdec.kv.deferred import DeferredWriter
from specdec.kv.pages import PagedKVCache
from specdec.types import Draft
from tests.drafting import TinyTarget, context_of, paths_of

VOCAB = 7
SCRIPT = [[(row + 3 * i) % VOCAB for i in range(60)] for row in range(3)]


def assistant(max_length: int | None = None) -> AssistantDrafter:
    def make_store(layers, num_rows: int, longest: int):
        cache = PagedKVCache(layers, 64, page_size=4, growable=True)
        return cache, DeferredWriter(cache)

    return AssistantDrafter.of(TinyTarget(VOCAB, max_length), VOCAB, make_store)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "assistant": assistant,
    "short-assistant": lambda: assistant(max_length=14),
    "scripted-tree": lambda: ScriptedDrafter(SCRIPT, VOCAB, depth=6, siblings=2, wrong_depths=(3,)),
    "always-wrong": lambda: AlwaysWrongDrafter(SCRIPT, VOCAB),
    "synthetic": lambda: SyntheticDrafter(SCRIPT, VOCAB, acceptance=0.6, siblings=1),
    "assistant+suffix": lambda: HybridDrafter(assistant(), SuffixDrafter()),
    "ngram+suffix": lambda: HybridDrafter(NGramDrafter(), SuffixDrafter()),
}

Step = tuple[list[int], list[int], list[list[int]]]
"""`(max_nodes, max_depths, tokens that are emitted next)` of each row; a row that emits nothing is done."""


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[list[int]], list[Step]]:
    token = st.integers(0, VOCAB - 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=3))
    numbers = st.lists(st.integers(0, 12), min_size=len(prompts), max_size=len(prompts))
    emitted = st.lists(st.lists(token, max_size=4), min_size=len(prompts), max_size=len(prompts))
    return prompts, draw(st.lists(st.tuples(numbers, numbers, emitted), max_size=4))


Paths = list[tuple[int, ...]]


def live(
    drafter: Drafter, prompts: list[list[int]], steps: list[Step], only: int | None = None
) -> list[dict[int, Paths]]:
    """Run one generation; returns the paths drafted for each row in each step.  `only`: the row that generates."""
    texts = [list(prompt) for prompt in prompts]
    drafter.begin(tuple(texts), 200)
    rows = list(range(len(texts))) if only is None else [only]
    drafts = []
    for max_nodes, max_depths, emitted in steps:
        if not rows:
            break
        before = [list(text) for text in texts]
        draft = drafter.propose(
            context_of(
                [texts[row] for row in rows],
                max_nodes=[max_nodes[row] for row in rows],
                max_depths=[max_depths[row] for row in rows],
                num_generated=[len(texts[row]) - len(prompts[row]) for row in rows],
                rows=rows,
            )
        )
        assert texts == before
        assert len(draft.tokens) == len(rows)
        draft.validate(VOCAB)
        for i, row in enumerate(rows):
            paths = paths_of(draft, i)
            assert len(paths) <= max_nodes[row]
            assert max(map(len, paths), default=0) <= max_depths[row]
        drafts.append({row: paths_of(draft, i) for i, row in enumerate(rows)})
        for row in rows:
            texts[row] += emitted[row]
        rows = [row for row in rows if emitted[row]]
    drafter.end()
    return drafts


@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=30)
@given(life=lives())
def test_drafts_are_valid_and_within_their_budgets(name: str, life) -> None:
    live(DRAFTERS[name](), *life)


@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=20)
@given(first=lives(), second=lives())
def test_a_used_drafter_drafts_like_a_new_one(name: str, first, second) -> None:
    used = DRAFTERS[name]()
    live(used, *first)
    assert live(used, *second) == live(DRAFTERS[name](), *second)


@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=20)
@given(life=lives())
def test_a_row_is_drafted_as_if_it_were_alone(name: str, life) -> None:
    together = live(DRAFTERS[name](), *life)
    for row in range(len(life[0])):
        alone = live(DRAFTERS[name](), *life, only=row)
        assert alone == [{row: draft[row]} for draft in together if row in draft]


@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=20)
@given(life=lives())
def test_forked_rows_are_drafted_like_any_other(name: str, life) -> None:
    prompts, steps = life
    prompts = [prompts[0]] * len(prompts)
    plain, forking = DRAFTERS[name](), Forking(DRAFTERS[name]())
    assert live(forking, prompts, steps) == live(plain, prompts, steps)


@final
class Forking(Drafter):
    """Takes every row of a batch for a copy of the first, as the loop does after prefill."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def taps(self) -> tuple[int, ...]:
        return self._drafter.taps

    def begin(self, prompts, max_length: int) -> None:
        self._drafter.begin(prompts, max_length)
        self._drafter.fork(0, tuple(range(1, len(prompts))))

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        self._drafter.fork(source, copies)

    def propose(self, context) -> Draft:
        return self._drafter.propose(context)

    def observe(self, window, features, verdict) -> None:
        self._drafter.observe(window, features, verdict)

    def end(self) -> None:
        self._drafter.end()
