"""The assistant drafter over a tiny model in plain torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.assistant import AssistantDrafter
from specdec.errors import ConfigError
from specdec.kv.deferred import DeferredWriter
from specdec.kv.direct import DirectWriter
from specdec.kv.pages import PagedKVCache
from specdec.sampling import GeneratorNoise, pick_tokens
from specdec.types import Draft
from tests.drafting import TinyTarget, accepted_of, context_of

VOCAB = 23
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Stores:
    """A store factory that remembers the caches it made."""

    def __init__(self, writer: type[DeferredWriter] | type[DirectWriter] = DeferredWriter, num_pages: int = 64) -> None:
        self.caches: list[PagedKVCache] = []
        self._writer = writer
        self._num_pages = num_pages

    def __call__(self, layers, num_rows: int, max_length: int):
        self.caches.append(PagedKVCache(layers, self._num_pages, page_size=4))
        return self.caches[-1], self._writer(self.caches[-1])

    def num_free(self) -> int:
        self.caches[-1].check()
        return self.caches[-1].allocator.num_free


def assistant_of(target: TinyTarget | None = None, stores: Stores | None = None, **options):
    target = target or TinyTarget(VOCAB)
    return AssistantDrafter.of(target, VOCAB, stores or Stores(), **options)


def drafts(draft: Draft) -> list[list[int]]:
    draft.validate(VOCAB)
    return [row[:n] for row, n in zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)]


def fresh_drafts(text: Sequence[int], count: int, target: TinyTarget | None = None) -> list[int]:
    return (target or TinyTarget(VOCAB)).continuation(text, count)


@pytest.mark.parametrize("writer", [DeferredWriter, DirectWriter])
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 6])
def test_a_model_that_drafts_for_itself_is_always_right(num_drafts: int, writer) -> None:
    drafter = assistant_of(stores=Stores(writer), num_drafts=num_drafts)
    truth = fresh_drafts(PROMPT, 60)
    text = list(PROMPT)
    drafter.begin((text,), 100)
    while len(text) < len(PROMPT) + 50:
        done = len(text) - len(PROMPT)
        draft = drafter.propose(context_of([text]))
        assert drafts(draft) == [truth[done : done + num_drafts]]
        text += truth[done : done + num_drafts + 1]
    drafter.end()


def test_only_what_is_missing_is_run() -> None:
    target = TinyTarget(VOCAB)
    drafter = assistant_of(target, num_drafts=4)
    drafter.begin((PROMPT,), 100)
    [chain] = drafts(drafter.propose(context_of([PROMPT])))
    # The prompt but its root without logits, then root and three drafts; the fourth draft is not run.
    assert [window.width for window in target.forwards] == [len(PROMPT) - 1, 1, 1, 1, 1]
    target.forwards.clear()
    text = [*PROMPT, *chain, 7]
    [chain] = drafts(drafter.propose(context_of([text])))
    assert [window.width for window in target.forwards] == [2, 1, 1, 1]
    target.forwards.clear()
    text += [chain[0], (chain[1] + 1) % VOCAB]
    drafter.propose(context_of([text]))
    assert [window.width for window in target.forwards] == [1, 1, 1, 1]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, VOCAB - 1)), max_size=6), st.integers(1, 4))
def test_drafts_after_any_history_are_those_of_a_fresh_cache(steps: list[tuple[int, int]], num_drafts: int) -> None:
    drafter = assistant_of(num_drafts=num_drafts)
    text = list(PROMPT)
    drafter.begin((text,), 200)
    for accepted, bonus in steps:
        [chain] = drafts(drafter.propose(context_of([text])))
        assert chain == fresh_drafts(text, num_drafts)
        text += [*chain[:accepted], bonus]
    assert drafts(drafter.propose(context_of([text]))) == [fresh_drafts(text, num_drafts)]
    drafter.end()


def test_a_root_that_was_drafted_before_is_run_again() -> None:
    drafter = assistant_of(num_drafts=4)
    drafter.begin((PROMPT,), 100)
    [chain] = drafts(drafter.propose(context_of([PROMPT])))
    for length in (1, 2, 4):
        text = PROMPT + chain[:length]
        assert drafts(drafter.propose(context_of([text]))) == [fresh_drafts(text, 4)]


def test_rows_of_a_batch_are_drafted_as_if_alone() -> None:
    texts = [list(PROMPT), [7], [2] * 19, [11, 12]]
    drafter = assistant_of(num_drafts=5)
    drafter.begin(tuple(texts), 100)
    draft = drafter.propose(context_of(texts, max_nodes=[5, 3, 9, 0], max_depths=[4, 9, 9, 9]))
    assert drafts(draft) == [fresh_drafts(texts[0], 4), fresh_drafts(texts[1], 3), fresh_drafts(texts[2], 5), []]
    for i, text in enumerate(texts):
        text += [i + 1] * (i + 1)
    draft = drafter.propose(context_of([texts[3], texts[1]], rows=[3, 1]))
    assert drafts(draft) == [fresh_drafts(texts[3], 5), fresh_drafts(texts[1], 5)]


def test_long_prompts_are_run_in_chunks() -> None:
    target = TinyTarget(VOCAB)
    drafter = assistant_of(target, prefill_chunk=6, num_drafts=2)
    texts = [[(7 * i) % VOCAB for i in range(40)], [(5 * i) % VOCAB for i in range(11)]]
    drafter.begin(tuple(texts), 100)
    assert drafts(drafter.propose(context_of(texts))) == [fresh_drafts(text, 2) for text in texts]
    assert max(window.width for window in target.forwards) == 6


def test_a_forked_prompt_is_run_once_and_shared() -> None:
    target, stores = TinyTarget(VOCAB), Stores()
    drafter = assistant_of(target, stores, num_drafts=3)
    prompt = [(3 * i) % VOCAB for i in range(14)]
    texts = [list(prompt) for _ in range(4)]
    drafter.begin(tuple(texts), 100)
    drafter.fork(0, (1, 3))
    assert [len(window.rows) for window in target.forwards] == [1]
    assert stores.caches[0].allocator.num_free == 64 - 4
    for i, text in enumerate(texts):
        text.append(i)
    assert drafts(drafter.propose(context_of(texts))) == [fresh_drafts(text, 3) for text in texts]
    texts[0].append(5)
    texts[3].append(6)
    assert drafts(drafter.propose(context_of(texts))) == [fresh_drafts(text, 3) for text in texts]
    drafter.end()
    assert stores.num_free() == 64


def noise_of(num_rows: int, vocab: int = VOCAB) -> GeneratorNoise:
    state = torch.Generator().manual_seed(5).get_state()
    return GeneratorNoise(state, num_rows, vocab, torch.device("cpu"))


def test_sampled_drafts_are_picked_with_the_noise_of_their_index() -> None:
    target, noise = TinyTarget(VOCAB, scale=0.05), noise_of(3)

    def sampled(row: int, index: int, text: list[int], count: int) -> list[int]:
        grown = list(text)
        for i in range(count):
            grown.append(int(pick_tokens(target.scores(grown)[None] / 0.7, noise.at(index + i)[row][None])))
        return grown[len(text) :]

    drafter = assistant_of(target, num_drafts=6)
    texts = [[5, 6], [7, 8, 9]]
    drafter.begin((texts[0], [0], texts[1]), 100)
    draft = drafter.propose(context_of(texts, rows=[0, 2], num_generated=[3, 8], noise=noise, temperature=0.7))
    assert drafts(draft) == [sampled(0, 3, texts[0], 6), sampled(2, 8, texts[1], 6)]
    assert drafts(draft)[1] != sampled(0, 8, texts[1], 6), "the noise of another row must make another text"
    assert drafts(draft) != [fresh_drafts(text, 6, target) for text in texts]


def test_the_same_noise_makes_related_models_agree_more_often() -> None:
    """Agreement of two distributions: coupled by common variates, and drawn apart."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(400, VOCAB, generator=generator)
    q = p + 0.7 * torch.randn(400, VOCAB, generator=generator)
    one, other = (torch.empty(400, VOCAB).exponential_(1, generator=generator) for _ in range(2))
    coupled = (pick_tokens(p, one) == pick_tokens(q, one)).float().mean()
    apart = (pick_tokens(p, one) == pick_tokens(q, other)).float().mean()
    assert coupled > 3 * apart


@pytest.mark.parametrize("own", [VOCAB - 3, VOCAB + 5])
def test_vocabularies_of_unequal_size_are_refused_by_name(own: int) -> None:
    with pytest.raises(ConfigError, match=f"vocabulary of {own} ids for a target of {VOCAB}"):
        assistant_of(TinyTarget(own))


@pytest.mark.parametrize("sampled", [False, True])
def test_ids_that_the_target_lacks_are_never_drafted(sampled: bool) -> None:
    target = TinyTarget(VOCAB + 5)
    target.forced = {VOCAB: torch.inf, VOCAB + 4: 1e9}
    drafter = assistant_of(target, common_vocabulary=True, num_drafts=6)
    drafter.begin((PROMPT,), 100)
    [chain] = drafts(drafter.propose(context_of([PROMPT], noise=noise_of(1) if sampled else None)))
    assert len(chain) == 6


@pytest.mark.parametrize("sampled", [False, True])
def test_ids_that_the_assistant_lacks_end_drafting_for_their_row(sampled: bool) -> None:
    noise = noise_of(2) if sampled else None
    target = TinyTarget(VOCAB - 3)
    drafter = assistant_of(target, common_vocabulary=True, num_drafts=4)
    texts = [[1, 2, 3], [4, 5]]
    drafter.begin(tuple(texts), 100)
    assert [len(chain) for chain in drafts(drafter.propose(context_of(texts, noise=noise)))] == [4, 4]
    texts[0] += [VOCAB - 3]
    texts[1] += [VOCAB - 4]
    assert [len(chain) for chain in drafts(drafter.propose(context_of(texts, noise=noise)))] == [0, 4]
    texts[0] += [1]
    assert [len(chain) for chain in drafts(drafter.propose(context_of(texts, noise=noise)))] == [0, 4]


def test_a_prompt_with_unknown_ids_forks_without_being_run() -> None:
    target = TinyTarget(VOCAB - 3)
    drafter = assistant_of(target, common_vocabulary=True)
    texts = [[1, VOCAB - 1, 3]] * 2
    drafter.begin(tuple(texts), 100)
    drafter.fork(0, (1,))
    assert drafts(drafter.propose(context_of(texts))) == [[], []]
    assert target.forwards == []


def test_where_the_assistants_context_ends_drafts_become_fewer_and_none() -> None:
    target = TinyTarget(VOCAB, max_length=12)
    drafter = assistant_of(target, num_drafts=5)
    text = list(PROMPT)
    drafter.begin((text, [1, 2]), 100)
    counts = []
    while len(text) < 16:
        chain, other = drafts(drafter.propose(context_of([text, [1, 2]])))
        assert chain == fresh_drafts(text, 5)[: len(chain)]
        assert len(other) == 5
        counts.append(len(chain))
        text.append(1)
    # The draft behind the last position is not run, so a text of 12 tokens still gets one.
    assert counts == [5, 4, 3, 2, 1, 0, 0, 0]


def test_a_prompt_longer_than_the_assistants_context_is_not_run() -> None:
    target = TinyTarget(VOCAB, max_length=8)
    drafter = assistant_of(target)
    texts = [[1] * 20, [1] * 20]
    drafter.begin(tuple(texts), 100)
    drafter.fork(0, (1,))
    draft = drafter.propose(context_of(texts))
    assert draft.lengths.tolist() == [0, 0] and draft.tokens.shape == (2, 0)
    assert target.forwards == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampled", [False, True])
def test_scores_that_are_not_finite_draft_nothing_and_are_reported_once(value: float, sampled: bool, caplog) -> None:
    target = TinyTarget(VOCAB)
    target.spoil = value
    drafter = assistant_of(target, num_drafts=3)
    texts = [[1, 2, 3], [4, 5]]
    drafter.begin(tuple(texts), 100)
    with caplog.at_level(logging.WARNING, logger="specdec"):
        context = context_of(texts, noise=noise_of(2) if sampled else None)
        for _ in range(2):
            assert drafts(drafter.propose(context))[0] == []
    assert len([record for record in caplog.records if "assistant's scores" in record.message]) == 1


def test_an_unsure_assistant_ends_its_draft_early() -> None:
    target = TinyTarget(VOCAB, scale=0.2)
    text = list(PROMPT)
    sure, grown = [], list(text)
    for _ in range(8):
        probs = target.scores(grown).softmax(-1)
        sure.append(float(probs.max()))
        grown.append(int(probs.argmax()))
    least = sorted(sure)[3]
    drafter = assistant_of(target, num_drafts=8, min_probability=least)
    drafter.begin((text,), 100)
    expected = next(i for i, probability in enumerate(sure) if probability < least) + 1
    assert drafts(drafter.propose(context_of([text]))) == [grown[len(text) :][:expected]]


@pytest.mark.parametrize("fails_at", range(7))
def test_a_failure_at_any_forward_leaves_a_working_drafter(fails_at: int) -> None:
    target, stores = TinyTarget(VOCAB), Stores()
    drafter = assistant_of(target, stores, num_drafts=3)
    texts = [list(PROMPT), [4, 5]]
    drafter.begin(tuple(texts), 100)
    target.fails_at = fails_at
    with pytest.raises(RuntimeError, match="broken"):
        for _ in range(3):
            drafter.propose(context_of(texts))
            for text in texts:
                text.append(9)
    target.fails_at = None
    assert drafts(drafter.propose(context_of(texts))) == [fresh_drafts(text, 3) for text in texts]
    target.fails_at = len(target.forwards) + 1
    with pytest.raises(RuntimeError, match="broken"):
        drafter.propose(context_of([[*text, 1, 2] for text in texts]))
    drafter.end()
    assert stores.num_free() == 64


def test_end_gives_all_pages_back_and_may_come_at_any_time() -> None:
    stores = Stores()
    drafter = assistant_of(stores=stores)
    drafter.end()
    drafter.begin((PROMPT,), 100)
    drafter.propose(context_of([PROMPT]))
    assert stores.num_free() < 64
    drafter.end()
    drafter.end()
    assert stores.num_free() == 64
    with pytest.raises(ConfigError, match="before `begin`"):
        drafter.fork(0, (1,))
    # A begin without the end of the generation before it ends that one first.
    drafter.begin((PROMPT,), 100)
    drafter.propose(context_of([PROMPT]))
    drafter.begin(([1, 2],), 100)
    stores.caches[1].check()
    assert stores.caches[1].allocator.num_free == 64
    assert drafts(drafter.propose(context_of([[1, 2]]))) == [fresh_drafts([1, 2], 5)]


def test_the_cache_holds_the_text_less_its_root_and_the_last_drafts() -> None:
    target, stores = TinyTarget(VOCAB), Stores()
    drafter = assistant_of(target, stores, num_drafts=4)
    text = list(PROMPT)
    drafter.begin((text,), 100)
    for step in range(6):
        [chain] = drafts(drafter.propose(context_of([text])))
        assert stores.caches[0].length(0) == len(text) + 3
        plain = PagedKVCache(target.layers, 64)
        plain.add_row()
        check = AssistantDrafter.of(target, VOCAB, lambda *_, cache=plain: (cache, DeferredWriter(cache)), num_drafts=1)
        check.begin((text,), 100)
        check.propose(context_of([text]))
        ours, theirs = stores.caches[0].read(0, 0), plain.read(0, 1)
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own[: len(text)], other)
        text += [*chain[: step % 5], 3]


def test_a_target_may_accept_what_a_smaller_model_drafts() -> None:
    target, small = TinyTarget(VOCAB, seed=1), TinyTarget(VOCAB, seed=1, scale=0.1)
    drafter = assistant_of(small, num_drafts=4)
    drafter.begin((PROMPT,), 100)
    assert accepted_of(drafter.propose(context_of([PROMPT])), target.continuation(PROMPT, 4)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_drafts": 0}, "num_drafts=0; accepted: an integer from 1 to 63"),
        ({"min_probability": -0.1}, r"min_probability=-0\.1"),
        ({"common_vocabulary": 1}, "common_vocabulary=1; accepted: True, False"),
        ({"prefill_chunk": 1}, "prefill_chunk=1"),
        ({"num_assistant_tokens": 3}, "num_assistant_tokens=3: unknown option of AssistantConfig"),
    ],
)
def test_invalid_options_are_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assistant_of(**options)
