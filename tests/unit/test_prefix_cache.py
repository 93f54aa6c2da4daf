"""Pages kept across calls: what is found again, what is run, and that the text does not change."""

from __future__ import annotations

import pytest
import torch

import specdec
from specdec import DeferredWriter, HFTarget, PagedKVCache, Sampler, SpecConfig, SpeculativeDecoder, Verdict, Window
from specdec.draft.adaptive import AdaptiveDrafter
from specdec.draft.eagle import EagleDraftConfig
from specdec.draft.hybrid import HybridDrafter
from specdec.draft.suffix import SuffixDrafter
from specdec.errors import ConfigError, UnsupportedError
from specdec.hf.eagle import eagle_drafter
from specdec.kv.metrics import WriterMetrics, metered
from specdec.kv.prefix import PrefixCache
from specdec.target import LayerShape
from tests.models import VOCAB, tiny_gpt2, tiny_llama, tiny_mistral
from tests.systems import GREEDY, SAMPLED
from tests.unit.test_eagle_drafter import agreeing_head, steady_llama

CPU = torch.device("cpu")
SHAPES = (LayerShape(1, 4, 4, torch.float32, CPU),)
PAGE = 4


def filled(tokens: list[int], cache: PagedKVCache | None = None) -> tuple[PagedKVCache, int]:
    """A row of `tokens` whose K say which token they belong to, and which came before it."""
    cache = cache or PagedKVCache(SHAPES, 16, PAGE, growable=True)
    row = cache.add_row()
    window = Window.chain([tokens], (row,), (0,), CPU)
    writer = DeferredWriter(cache)
    writer.begin(window)
    history = torch.tensor(tokens).float().cumsum(0)[None, :, None, None]
    k = torch.tensor(tokens).float()[None, :, None, None].expand(-1, -1, 1, 4)
    writer.stage(0, k, history.expand(-1, -1, 1, 4))
    writer.commit(Verdict.keep_all(window, torch.zeros(1, dtype=torch.long)))
    return cache, row


def loaded(store: PrefixCache, tokens: list[int], limit: int | None = None) -> tuple[int, torch.Tensor, torch.Tensor]:
    cache = PagedKVCache(SHAPES, 16, PAGE)
    row = cache.add_row()
    length = store.load(cache, row, tokens, len(tokens) if limit is None else limit)
    assert cache.length(row) == length
    k, v = cache.read(0, row)
    return length, k[:, 0, 0], v[:, 0, 0]


def text(*parts: tuple[int, int]) -> list[int]:
    """`(first, count)` runs of ascending tokens."""
    return [first + i for first, count in parts for i in range(count)]


def test_the_longest_beginning_of_full_pages_is_found_and_copied():
    store = PrefixCache()
    store.keep(*filled(text((0, 11))), text((0, 11)))
    assert len(store) == 2, "the last page is not full"
    for tokens, expected in (
        (text((0, 11)), 8),
        (text((0, 7)), 4),
        (text((0, 4), (50, 9)), 4),
        (text((50, 4), (4, 7)), 0),
        (text((0, 3)), 0),
    ):
        length, k, v = loaded(store, tokens)
        assert length == expected
        assert k.tolist() == tokens[:expected]
        assert v.tolist() == torch.tensor(tokens[:expected]).cumsum(0).tolist()
    assert loaded(store, text((0, 11)), limit=7)[0] == 4
    assert store.counters.tokens_found == 8 + 4 + 4 + 4


def test_equal_pages_behind_other_beginnings_are_not_confused():
    """The second page of both texts holds equal tokens, but other rows."""
    store = PrefixCache()
    for first in (0, 100):
        tokens = text((first, 4), (50, 4))
        store.keep(*filled(tokens), tokens)
    assert len(store) == 4
    for first in (0, 100):
        tokens = text((first, 4), (50, 4))
        assert loaded(store, tokens)[2].tolist() == torch.tensor(tokens).cumsum(0).tolist()


def test_a_page_that_depends_on_the_next_token_is_keyed_with_it():
    """A draft head's row of the token at i holds the token at i + 1 as well."""
    store = PrefixCache(keyed_with_successor=True)
    tokens = text((0, 8), (60, 1))
    store.keep(*filled(tokens[:8]), tokens)
    assert loaded(store, [*tokens, 61])[0] == 8
    assert loaded(store, text((0, 8), (70, 2)))[0] == 4, "the same eight tokens, another successor"
    assert loaded(store, text((0, 8)))[0] == 4, "no successor known"
    assert loaded(PrefixCache(), tokens)[0] == 0


def test_only_committed_tokens_are_kept():
    store = PrefixCache()
    cache, row = filled(text((0, 6)))
    store.keep(cache, row, text((0, 9)))
    assert len(store) == 1


def test_the_least_recently_used_go_first_and_the_end_of_a_text_before_its_beginning():
    store = PrefixCache(max_pages=4)
    for first in (0, 100):
        tokens = text((first, 8))
        store.keep(*filled(tokens), tokens)
    loaded(store, text((0, 8)))
    tokens = text((200, 4))
    store.keep(*filled(tokens), tokens)
    assert len(store) == 4 and store.counters.evictions == 1
    assert [loaded(store, text((first, 8)))[0] for first in (0, 100, 200)] == [8, 4, 4]


def test_a_text_longer_than_the_store_is_kept_from_its_beginning():
    store = PrefixCache(max_pages=2)
    tokens = text((0, 20))
    for _ in range(2):
        store.keep(*filled(tokens), tokens)
        assert len(store) == 2 and loaded(store, tokens)[0] == 8


def test_the_store_grows_with_what_is_kept_and_loses_nothing():
    store = PrefixCache()
    texts = [text((1000 * i, 40)) for i in range(20)]
    for tokens in texts:
        store.keep(*filled(tokens), tokens)
    assert len(store) == 200
    for tokens in texts:
        assert loaded(store, tokens)[1].tolist() == tokens


def test_running_caches_and_kept_pages_do_not_share_storage():
    store = PrefixCache()
    tokens = text((0, 8))
    cache, row = filled(tokens)
    store.keep(cache, row, tokens)
    for plane in cache.planes:
        plane.pages.fill_(float("nan"))
    assert loaded(store, tokens)[1].tolist() == tokens


def test_other_formats_and_other_owners_are_refused():
    store = PrefixCache()
    tokens = text((0, 8))
    store.keep(*filled(tokens), tokens)
    for other in (
        PagedKVCache(SHAPES, 4, 1),
        PagedKVCache(SHAPES * 2, 4, PAGE),
        PagedKVCache(SHAPES, 4, PAGE, kv_dtype="int8"),
    ):
        with pytest.raises(ConfigError, match="another format"):
            store.load(other, other.add_row(), tokens, 8)
    one, two = object(), object()
    store.claim(one)
    store.claim(one)
    with pytest.raises(ConfigError, match="another model"):
        store.claim(two)
    store.clear()
    store.claim(two)
    assert len(store) == 0
    with pytest.raises(ConfigError, match="max_pages=0"):
        PrefixCache(max_pages=0)


# -- in the loop -----------------------------------------------------------------------------------------------------


def run_turns(model, store, turns, drafter="suffix", mode=GREEDY, new_tokens=12, rows=1, **options):
    """Chat turns: each prompt is the text so far and something new; returns outputs and prompt rows run per turn."""
    torch.manual_seed(0)
    text, outputs, prefilled = torch.randint(3, VOCAB, (rows, 40), generator=torch.Generator().manual_seed(1)), [], []
    for turn in range(turns):
        metrics, records = WriterMetrics(), []
        text = specdec.generate(
            model,
            text,
            attention_mask=torch.ones_like(text),
            drafter=drafter,
            prefix_cache=store,
            writer=metered(DeferredWriter, metrics),
            on_step=records.append,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **mode,
            **options,
        )
        outputs.append(text.tolist())
        prefilled.append(metrics.rows_committed - sum(record.commit.rows_committed for record in records))
        question = torch.randint(3, VOCAB, (rows, 9), generator=torch.Generator().manual_seed(turn + 2))
        text = torch.cat([text, question], dim=1)
    return outputs, prefilled


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED])
@pytest.mark.parametrize(("make", "rows"), [(tiny_llama, 1), (tiny_llama, 3), (tiny_mistral, 1), (tiny_gpt2, 2)])
def test_turns_run_only_what_is_new_and_say_the_same(make, rows, mode):
    model = make()
    expected, everything = run_turns(model, None, 3, mode=mode, rows=rows)
    store = PrefixCache()
    outputs, prefilled = run_turns(model, store, 3, mode=mode, rows=rows)
    assert outputs == expected
    assert prefilled[0] == everything[0] == rows * 39
    # Of a turn, what was committed before it is found, less the page that was not full.
    for turn, length in ((1, 51), (2, 72)):
        assert prefilled[turn] == everything[turn] - rows * (length // 16 * 16)
    assert store.counters.tokens_found == rows * (48 + 64)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_quantised_pages_are_kept_as_they_are(kv_dtype):
    options = {"spec_config": SpecConfig(kv_dtype=kv_dtype)}
    expected, _ = run_turns(tiny_llama(), None, 2, **options)
    store = PrefixCache()
    assert run_turns(tiny_llama(), store, 2, **options)[0] == expected
    assert store.counters.tokens_found == 48


def test_a_prompt_that_is_kept_whole_still_runs_its_last_token():
    """Prompt of exactly two pages and its root, given twice."""
    model, store = tiny_llama(), PrefixCache()
    prompt = torch.randint(3, VOCAB, (1, 33), generator=torch.Generator().manual_seed(0))
    outputs = [
        specdec.generate(model, prompt, prefix_cache=store, max_new_tokens=8, pad_token_id=0).tolist() for _ in range(2)
    ]
    assert outputs[0] == outputs[1] == model.generate(prompt, max_new_tokens=8, pad_token_id=0).tolist()
    assert store.counters.tokens_found == 32


def test_rows_with_equal_prompts_load_once():
    model, store = tiny_llama(), PrefixCache()
    prompt = torch.randint(3, VOCAB, (1, 33), generator=torch.Generator().manual_seed(0))
    options = dict(prefix_cache=store, max_new_tokens=8, pad_token_id=0)
    specdec.generate(model, prompt, **options)
    several = specdec.generate(model, prompt.expand(3, -1), **options)
    assert store.counters.tokens_found == 32
    assert several.tolist() == model.generate(prompt.expand(3, -1), max_new_tokens=8, pad_token_id=0).tolist()


def test_two_texts_that_share_exactly_a_page_and_then_differ():
    model, store = tiny_llama(), PrefixCache()
    first = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    second = first.clone()
    second[0, 16:] = (second[0, 16:] + 1) % VOCAB
    for prompt in (first, second):
        output = specdec.generate(model, prompt, prefix_cache=store, max_new_tokens=8, pad_token_id=0)
        assert output.tolist() == model.generate(prompt, max_new_tokens=8, pad_token_id=0).tolist()
    assert store.counters.tokens_found == 16


def test_what_a_failed_run_computed_is_not_kept():
    model, store = tiny_llama(), PrefixCache()
    prompt = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    decoder = SpeculativeDecoder(HFTarget(model), SuffixDrafter(), prefixes=store)
    with (
        pytest.raises(ArithmeticError),
        decoder.start(prompt, sampler=Sampler(prompt, criteria=[]), max_length=60) as run,
    ):
        decoder.step(run)
        raise ArithmeticError
    assert len(store) == 0
    with decoder.start(prompt, sampler=Sampler(prompt, criteria=[]), max_length=60) as run:
        decoder.step(run)
    assert len(store) == 2
    # A stream that is left early has not failed.
    other = prompt + 1
    for _ in decoder.stream(other % VOCAB, sampler=Sampler(other % VOCAB, criteria=[]), max_length=60):
        break
    assert len(store) == 4


def test_misuse():
    store, prompt = PrefixCache(), torch.tensor([[5, 6, 7]])
    specdec.generate(tiny_llama(), prompt, prefix_cache=store, max_new_tokens=2, pad_token_id=0)
    with pytest.raises(ConfigError, match="another model"):
        specdec.generate(tiny_llama(), prompt, prefix_cache=store, max_new_tokens=2, pad_token_id=0)
    with pytest.raises(UnsupportedError, match="token_type_ids"):
        specdec.generate(
            tiny_gpt2(), prompt, token_type_ids=prompt, prefix_cache=PrefixCache(), max_new_tokens=2, pad_token_id=0
        )


@pytest.mark.parametrize("rows", [1, 2])
def test_a_draft_head_drafts_as_if_it_had_seen_the_whole_prompt(rows):
    """The head's pages are kept too, keyed with the token behind them: equal drafts, so equal steps."""
    model = steady_llama()
    drafts, stores = {}, {}
    for name in ("fresh", "kept"):
        records, store = [], None if name == "fresh" else PrefixCache()
        drafter = eagle_drafter(agreeing_head(model), model, EagleDraftConfig(depth=3, width=2, nodes=6))
        torch.manual_seed(0)
        text = torch.randint(3, VOCAB, (rows, 40), generator=torch.Generator().manual_seed(1))
        for turn in range(3):
            text = specdec.generate(
                model,
                text,
                drafter=drafter,
                prefix_cache=store,
                on_step=records.append,
                max_new_tokens=12,
                pad_token_id=0,
            )
            text = torch.cat([text, torch.full((rows, 5 + turn), 7)], dim=1)
        drafts[name] = [(record.draft_tokens, record.draft_parents, record.emitted) for record in records]
        stores[name] = store
    assert drafts["kept"] == drafts["fresh"]
    assert sum(len(row) for tokens, *_ in drafts["kept"] for row in tokens) > 30
    assert stores["kept"].counters.tokens_found == rows * (48 + 64)
    assert stores["kept"].draft.counters.tokens_found == rows * (48 + 64)


def test_features_that_a_drafter_has_not_kept_are_run_again():
    """A store with pages of the target only: a drafter that needs features of all tokens gets them."""
    model, store = steady_llama(), PrefixCache()
    prompt = torch.randint(3, VOCAB, (1, 60), generator=torch.Generator().manual_seed(1))
    options = dict(prefix_cache=store, max_new_tokens=6, pad_token_id=0)
    expected = specdec.generate(model, prompt, drafter="none", **options).tolist()
    records = []
    drafter = eagle_drafter(agreeing_head(model), model, EagleDraftConfig(depth=3, width=1, nodes=3))
    hybrid = HybridDrafter(drafter, SuffixDrafter())
    output = specdec.generate(model, prompt, drafter=hybrid, on_step=records.append, **options)
    assert output.tolist() == expected and store.counters.tokens_found == 0
    assert records[0].draft_tokens[0], "the head has seen the prompt and drafts"
    specdec.generate(model, prompt, drafter=AdaptiveDrafter(hybrid), **options)
    assert store.counters.tokens_found == 48
