"""The paged cache: references, forks, growth, truncation, and accounting that never contradicts itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import PagedKVCache
from specdec.errors import CacheCorruption, ConfigError, OutOfPages
from specdec.kv.pages import BlockAllocator
from specdec.target import LayerShape

LAYERS = [LayerShape(1, 2, 2, torch.float32, torch.device("cpu"))]


def write(cache: PagedKVCache, row: int, values: list[int]) -> None:
    """Append tokens whose K rows hold the given values."""
    cache.reserve([row], [len(values)])
    slots = cache.slots(row, cache.length(row), len(values))
    for pages in cache.layer_pages(0):
        pages.flatten(0, 1)[slots] = torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
    cache.advance(row, len(values))


def held(cache: PagedKVCache, row: int) -> list[int]:
    return [int(value) for value in cache.read(0, row)[0][:, 0, 0]]


@given(
    page_size=st.sampled_from([1, 4, 16]),
    moves=st.lists(
        st.tuples(st.sampled_from(["write", "fork", "truncate", "free"]), st.integers(0, 5), st.integers(0, 20)),
        max_size=40,
    ),
)
@settings(max_examples=150)
def test_rows_hold_what_was_written_to_them_and_no_page_is_lost(page_size, moves):
    cache = PagedKVCache(LAYERS, 4, page_size, growable=True)
    texts: list[list[int]] = [[]]
    cache.add_row()
    serial = 0
    for kind, which, amount in moves:
        row = which % len(texts)
        if kind == "write":
            values = list(range(serial, serial := serial + amount))
            write(cache, row, values)
            texts[row] += values
        elif kind == "fork" and len(texts) < 6:
            cache.fork(row)
            texts.append(list(texts[row]))
        elif kind == "truncate":
            length = amount % (len(texts[row]) + 1)
            cache.truncate(row, length)
            del texts[row][length:]
        elif kind == "free":
            cache.free_row(row)
            texts[row] = []
        cache.check()
        for i, text in enumerate(texts):
            assert held(cache, i) == text
    cache.free_all()
    assert cache.allocator.num_free == cache.allocator.num_pages


def test_a_truncated_fork_does_not_write_into_its_sources_pages():
    cache = PagedKVCache(LAYERS, 16, 4)
    source = cache.add_row()
    write(cache, source, list(range(12)))
    copy = cache.fork(source)
    cache.truncate(copy, 5)
    write(cache, copy, [100, 101, 102, 103, 104])
    assert held(cache, source) == list(range(12))
    assert held(cache, copy) == [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]


def test_shortage_is_all_or_nothing_and_says_how_many_tokens_fit():
    cache = PagedKVCache(LAYERS, 4, 4)
    rows = [cache.add_row(), cache.add_row()]
    with pytest.raises(OutOfPages, match="20 more tokens need 6 pages of 4, 4 of 4 are free: 16 tokens fit"):
        cache.reserve(rows, [9, 11])
    assert cache.allocator.num_free == 4
    cache.reserve(rows, [8, 8])
    cache.check()


def test_growth_keeps_what_is_there():
    cache = PagedKVCache(LAYERS, 2, 4, growable=True)
    row = cache.add_row()
    write(cache, row, list(range(8)))
    write(cache, row, list(range(8, 60)))
    assert held(cache, row) == list(range(60))
    cache.check()


@pytest.mark.parametrize("bad", [{"page_size": 3}, {"page_size": 0}, {"num_pages": 0}])
def test_impossible_sizes_are_named(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        PagedKVCache(LAYERS, **{"num_pages": 4, **bad})


def test_the_allocator_notices_double_frees_and_strangers():
    allocator = BlockAllocator(4)
    pages = allocator.take(2)
    allocator.release(pages)
    with pytest.raises(CacheCorruption, match="released though nobody holds it"):
        allocator.release(pages)
    with pytest.raises(CacheCorruption, match="shared though nobody holds it"):
        allocator.share(pages)


def test_a_lost_page_is_noticed():
    cache = PagedKVCache(LAYERS, 4, 4)
    row = cache.add_row()
    write(cache, row, [1, 2, 3])
    cache.allocator.take(1)
    with pytest.raises(CacheCorruption, match="0 rows hold it, the allocator counts 1"):
        cache.check()
