"""The suffix automaton against brute force, and the drafter and its memory."""

from __future__ import annotations

import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.suffix import OutputMemory, SuffixAutomaton, SuffixDrafter
from specdec.draft.tree import SEPARATOR
from specdec.errors import ConfigError
from tests.drafting import accepted_of, context_of, paths_of

texts = st.lists(st.integers(0, 2), max_size=40)


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


def ends_of(piece: list[int], text: list[int]) -> list[int]:
    """Places behind the occurrences of a piece of text."""
    return [end for end in range(len(piece), len(text) + 1) if text[end - len(piece) : end] == piece]


@given(texts)
def test_the_repeated_suffix_and_all_its_places(text: list[int]) -> None:
    automaton = automaton_of(text)
    state, length = automaton.repeated_suffix
    lengths = [n for n in range(1, len(text)) if len(ends_of(text[-n:], text)) > 1]
    assert length == max(lengths, default=0)
    while length > 0:
        assert sorted(automaton.places(state)) == ends_of(text[-length:], text)
        fewer = ends_of(text[-length:], text)
        state, length = automaton.shorter(state)
        # A shorter suffix is named only where it stands at more places, and none of those is passed over.
        more = [n for n in lengths if len(ends_of(text[-n:], text)) > len(fewer)]
        assert length == max(more, default=0)


@given(texts, st.lists(st.integers(0, 3), max_size=30))
def test_the_longest_match_of_another_text(text: list[int], other: list[int]) -> None:
    automaton = automaton_of(text)
    match = (0, 0)
    for read in range(1, len(other) + 1):
        match = automaton.follow(match, other[read - 1])
        lengths = [n for n in range(1, read + 1) if ends_of(other[read - n : read], text)]
        assert match[1] == max(lengths, default=0)
        if match[1]:
            assert sorted(automaton.places(match[0])) == ends_of(other[read - match[1] : read], text)


@given(texts, texts)
def test_a_copy_grows_on_its_own(text: list[int], more: list[int]) -> None:
    automaton = automaton_of(text)
    twin = automaton.copy()
    for token in more:
        twin.append(token)
    for grown, expected in ((automaton, text), (twin, text + more)):
        fresh = automaton_of(expected)
        assert grown.repeated_suffix == fresh.repeated_suffix
        assert sorted(grown.places(grown.repeated_suffix[0])) == sorted(fresh.places(fresh.repeated_suffix[0]))


def test_the_automaton_stays_linear_in_the_text() -> None:
    for text in ([0] * 2000, [0, 1, 2] * 700, [n * n % 7 for n in range(2000)]):
        automaton = automaton_of(text)
        assert len(automaton._next) <= 2 * len(text)
        assert sum(map(len, automaton._next)) <= 3 * len(text)
        assert sum(map(len, automaton._below)) <= 4 * len(text)


def draft_paths(text: list[int], **options) -> list[tuple[int, ...]]:
    drafter = SuffixDrafter.of(**options)
    drafter.begin((text,), 1000)
    return paths_of(drafter.propose(context_of([text])))


def test_the_longest_match_is_followed() -> None:
    text = [1, 2, 3, 7, 8, 9, 3, 4, 5, 6, 1, 2, 3]
    assert draft_paths(text)[:2] == [(7,), (7, 8)]


def test_frequent_continuations_come_first() -> None:
    text = [1, 2, 5, 1, 2, 6, 1, 2, 5, 1, 2, 5, 1, 2]
    paths = draft_paths(text, max_depth=2)
    assert paths.index((5,)) < paths.index((6,))


def test_short_matches_give_short_drafts() -> None:
    passage = list(range(100, 140))
    barely = draft_paths([*passage, 100])
    well = draft_paths([*passage, *passage[:8]])
    assert 1 <= len(barely) <= 8
    assert len(well) >= 24 and well[-1] == tuple(passage[8 : 8 + len(well)])


def test_a_loop_is_drafted_to_the_full_depth() -> None:
    loop = [4, 5, 6] * 5
    assert max(map(len, draft_paths(loop))) == 32
    assert accepted_of_loop(loop) == 32


def accepted_of_loop(loop: list[int]) -> int:
    drafter = SuffixDrafter()
    drafter.begin((loop,), 1000)
    return accepted_of(drafter.propose(context_of([loop])), [4, 5, 6] * 20)


@pytest.mark.parametrize(("min_match", "drafts"), [(1, True), (2, True), (3, False)])
def test_matches_below_the_least_are_not_drafted(min_match: int, drafts: bool) -> None:
    assert bool(draft_paths([1, 2, 9, 8, 1, 2], min_match=min_match)) is drafts


def test_limits_of_the_configuration_hold() -> None:
    loop = [4, 5, 6] * 9
    assert len(draft_paths(loop, max_nodes=5)) == 5
    assert max(map(len, draft_paths(loop, max_depth=4))) == 4
    assert draft_paths([1, 2, 1], min_probability=0.9) == []


def test_a_drafter_is_reused_for_a_shorter_prompt() -> None:
    drafter = SuffixDrafter()
    for prompt, token in ((list(range(60)) * 3, 0), ([3, 4, 5, 3], 4)):
        drafter.begin((prompt,), 1000)
        assert paths_of(drafter.propose(context_of([prompt])))[0] == (token,)
        drafter.end()


def generate(drafter: SuffixDrafter, prompt: list[int], output: list[int]) -> int:
    """One generation that emits a token a step; returns the tokens drafted right before the last."""
    tokens = list(prompt)
    drafter.begin((tokens,), 1000)
    right = 0
    for token in output:
        right = accepted_of(drafter.propose(context_of([tokens])), output[len(tokens) - len(prompt) :])
        tokens.append(token)
    drafter.end()
    return right


def first_draft(drafter: SuffixDrafter, tokens: list[int]) -> list[tuple[int, ...]]:
    drafter.begin((list(tokens),), 1000)
    paths = paths_of(drafter.propose(context_of([tokens])))
    drafter.end()
    return paths


def test_without_memory_a_new_generation_knows_nothing_of_the_last() -> None:
    drafter = SuffixDrafter()
    generate(drafter, [1, 2], [10, 11, 12, 13])
    assert first_draft(drafter, [5, 10, 11]) == []


def test_remembered_outputs_are_drafted_from() -> None:
    drafter = SuffixDrafter.of(memory_tokens=100)
    generate(drafter, [1, 2], [10, 11, 12, 13, 14])
    # The last token, which no proposal saw, is remembered too; the prompt is not.
    assert first_draft(drafter, [5, 10, 11, 12])[:2] == [(13,), (13, 14)]
    assert first_draft(drafter, [5, 1]) == []
    # Nothing is drafted past the end of an output into the next one.
    generate(drafter, [1], [20, 21])
    assert first_draft(drafter, [5, 13, 14]) == []


def test_memory_and_own_text_share_a_tree() -> None:
    drafter = SuffixDrafter.of(memory_tokens=100)
    generate(drafter, [1, 2], [10, 11, 12])
    assert {(12,), (13,)} <= set(first_draft(drafter, [10, 11, 13, 7, 10, 11]))


def test_copies_of_a_row_take_its_place_in_the_memory_over() -> None:
    drafter = SuffixDrafter.of(memory_tokens=100)
    generate(drafter, [1, 2], [10, 11, 12])
    prompts = ([5, 10, 11], [5, 10, 11])
    drafter.begin(prompts, 1000)
    drafter.fork(0, (1,))
    draft = drafter.propose(context_of(prompts))
    assert paths_of(draft, 0) == paths_of(draft, 1) == [(12,)]


@given(st.lists(st.lists(st.integers(0, 5), max_size=9), max_size=8), st.integers(0, 20))
def test_the_memory_holds_the_latest_outputs_within_its_capacity(outputs: list[list[int]], capacity: int) -> None:
    memory = OutputMemory(capacity)
    for output in outputs:
        memory.remember(output)
        text = memory.automaton.text
        kept = [token for token in text if token != SEPARATOR]
        assert len(kept) <= capacity
        ends = output[-capacity:] if capacity else []
        if ends:
            assert text[-len(ends) - 1 :] == [*ends, SEPARATOR]


@pytest.mark.parametrize("kind", ["varied", "loop", "constant"])
def test_proposing_is_cheap_on_long_texts(kind: str) -> None:
    text = {
        "varied": [(n * n * 31 + n // 7) % 997 for n in range(4096)],
        "loop": [n % 3 for n in range(4096)],
        "constant": [7] * 4096,
    }[kind]
    drafter = SuffixDrafter()
    drafter.begin((text,), 8192)
    drafter.propose(context_of([text]))
    times = []
    for _ in range(20):
        text.append(text[len(text) - 500])
        context = context_of([text])
        start = time.perf_counter()
        drafter.propose(context)
        times.append(time.perf_counter() - start)
    # Far above what it takes, so that a busy machine does not fail, and far below a search through the text.
    assert statistics.median(times) < 5e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 0}, "min_match=0"),
        ({"max_nodes": 64}, "max_nodes=64; accepted: an integer from 1 to 63"),
        ({"max_depth": 0}, "max_depth=0"),
        ({"min_probability": 1.5}, r"min_probability=1\.5; accepted: a number from 0\.0 to 1\.0"),
        ({"max_places": 0}, "max_places=0"),
        ({"memory_tokens": -1}, "memory_tokens=-1"),
        ({"alpha": 2}, "alpha=2: unknown option of SuffixConfig"),
    ],
)
def test_invalid_options_are_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SuffixDrafter.of(**options)
