"""Pages of earlier texts, found again by what they hold: a prompt that begins alike need not run them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import final

import numpy as np

from specdec.config import require_int
from specdec.errors import ConfigError
from specdec.kv.pages import PagedKVCache

FIRST_PAGES = 64
"""Pages of the store at first; it grows with what is kept."""


@dataclass
class PrefixCounters:
    """What a `PrefixCache` did, since it was made."""

    tokens_asked: int = 0
    """Prompt tokens that might have been found."""
    tokens_found: int = 0
    pages_kept: int = 0
    """Pages copied into the store."""
    evictions: int = 0


@final
class PrefixCache:
    """Keeps copies of full pages from one generation to the next, keyed by all tokens up to their end.

    Only committed tokens are keyed, and pages are found from the front without a gap.  Copies, rather than pages shared
    with a running generation: those give all pages back at their end whatever happens, and kept ones are never written.
    A store serves one model; the least recently used pages go first, a text's last pages before its first.
    """

    def __init__(self, max_pages: int = 4096, *, keyed_with_successor: bool = False) -> None:
        """Args:
        max_pages: most pages kept.
        keyed_with_successor: rows depend on the token behind them as well, as a draft head's do.
        """
        require_int("max_pages", max_pages, 1, None)
        self.counters = PrefixCounters()
        self._max_pages = max_pages
        self._keyed_with_successor = keyed_with_successor
        self._draft: PrefixCache | None = None
        self._owner: object | None = None
        self._store: PagedKVCache | None = None
        self._pages: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        """Pages kept."""
        return len(self._pages)

    @property
    def draft(self) -> PrefixCache:
        """The store of a draft head that goes with this one."""
        if self._draft is None:
            self._draft = PrefixCache(self._max_pages, keyed_with_successor=True)
        return self._draft

    def claim(self, owner: object) -> None:
        """Say whose K/V these are.  Raises `ConfigError` where they are another's: equal tokens, different rows."""
        if self._owner is not None and self._owner is not owner:
            raise ConfigError("prefix_cache belongs to another model; accepted: one PrefixCache for each model")
        self._owner = owner

    def load(self, cache: PagedKVCache, row: int, tokens: Sequence[int], limit: int) -> int:
        """Fill an empty row with the longest kept beginning of `tokens`, at most `limit` tokens; returns its length."""
        self.counters.tokens_asked += max(0, limit)
        store = self._store_like(cache)
        found: list[tuple[bytes, int]] = []
        for key in self._keys(tokens, limit, cache.page_size):
            if key not in self._pages:
                break
            found.append((key, self._pages[key]))
        if not found:
            return 0
        length = len(found) * cache.page_size
        cache.reserve((row,), [length])
        copy_pages(store, [page for _, page in found], cache, list(cache.pages_of(row)[: len(found)]))
        cache.advance(row, length)
        self._touch([key for key, _ in found])
        self.counters.tokens_found += length
        return length

    def keep(self, cache: PagedKVCache, row: int, tokens: Sequence[int]) -> None:
        """Copy the full pages of a row that are not kept yet; `tokens` are those whose K/V the row holds, and one more
        where keys take the successor in."""
        store = self._store_like(cache)
        keys = list(self._keys(tokens, cache.length(row), cache.page_size))[: self._max_pages]
        self._touch([key for key in keys if key in self._pages])
        missing = [i for i, key in enumerate(keys) if key not in self._pages]
        # What is missing is the end of the text: its beginning was touched just now, and is not what goes.
        places = self._room_for(store, len(missing))
        copy_pages(cache, [cache.pages_of(row)[i] for i in missing], store, places)
        for i, page in zip(missing, places, strict=True):
            self._pages[keys[i]] = page
        self._touch(keys)
        self.counters.pages_kept += len(missing)

    def clear(self) -> None:
        """Forget everything, the owner included; call it after a model's weights have changed."""
        self._store = None
        self._owner = None
        self._pages.clear()
        if self._draft is not None:
            self._draft.clear()

    def _keys(self, tokens: Sequence[int], limit: int, page_size: int) -> Iterator[bytes]:
        """The key of each full page within the first `limit` tokens: a digest over everything up to its end."""
        digest = b""
        ahead = 1 if self._keyed_with_successor else 0
        for end in range(page_size, min(limit, len(tokens) - ahead) + 1, page_size):
            page = np.asarray(tokens[end - page_size : end + ahead], dtype=np.int64)
            digest = blake2b(digest + page.tobytes(), digest_size=16).digest()
            yield digest

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Mark as used last, the first page of the text latest: without it those behind it cannot be found."""
        for key in reversed(keys):
            self._pages.move_to_end(key)

    def _room_for(self, store: PagedKVCache, count: int) -> list[int]:
        while len(self._pages) + count > self._max_pages:
            _, page = self._pages.popitem(last=False)
            store.allocator.release([page])
            self.counters.evictions += 1
        if store.allocator.num_free < count:
            held = store.allocator.num_pages
            store.grow(min(max(held, count), self._max_pages - held))
        return store.allocator.take(count)

    def _store_like(self, cache: PagedKVCache) -> PagedKVCache:
        """The store, in the format of the cache.  Raises `ConfigError` where it holds pages of another format."""
        if self._store is None or (not self._pages and not cache.same_format(self._store)):
            self._store = cache.empty_like(min(FIRST_PAGES, self._max_pages))
        if not cache.same_format(self._store):
            raise ConfigError("prefix_cache holds pages of another format; accepted: equal page_size, kv_dtype, layers")
        return self._store


def copy_pages(
    source: PagedKVCache, source_pages: Sequence[int], target: PagedKVCache, target_pages: Sequence[int]
) -> None:
    """Copy whole pages, all layers and parts, between caches of one format."""
    if not source_pages:
        return
    for from_plane, to_plane in zip(source.planes, target.planes, strict=True):
        to_plane.pages[:, list(target_pages)] = from_plane.pages[:, list(source_pages)]
