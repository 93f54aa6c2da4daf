"""Pages of K/V: who owns which, and where the committed tokens of each row lie."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.errors import CacheCorruption, ConfigError, OutOfPages
from specdec.kv.codec import Encoded, LayerScales, make_codecs
from specdec.target import LayerShape
from specdec.types import PrefixLayout, decode_rows, select_scales

PAGE_SIZES = (1, 4, 16, 64)

Place = tuple[int, int]
"""`(plane, index of the layer in it)`."""


class BlockAllocator:
    """Hands out page numbers and counts references; lowest free numbers first, so that fresh rows lie contiguously."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))
        self._references = [0] * num_pages
        self.peak_held = 0
        """Most pages that were held at once."""

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Rows that hold the page."""
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """Take `count` pages, or none: raises `OutOfPages`."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        self.peak_held = max(self.peak_held, self.num_pages - self.num_free)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to each page."""
        for page in pages:
            if self._references[page] < 1:
                raise CacheCorruption(f"page {page} is shared though nobody holds it")
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page; pages without any are free again."""
        for page in pages:
            if self._references[page] < 1:
                raise CacheCorruption(f"page {page} is released though nobody holds it")
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)

    def grow(self, count: int) -> None:
        """Add `count` free pages behind the last."""
        for page in range(self.num_pages, self.num_pages + count):
            heapq.heappush(self._free, page)
        self._references += [0] * count

    def check(self) -> None:
        """Raise `CacheCorruption` unless free pages are exactly those without references."""
        unheld = sorted(page for page, count in enumerate(self._references) if count == 0)
        if sorted(self._free) != unheld or min(self._references, default=0) < 0:
            raise CacheCorruption(f"free list {sorted(self._free)} is not the set of unheld pages {unheld}")


@dataclass(frozen=True)
class Plane:
    """One kind of row (K, V, or a scale) of a group of layers alike in shape and device."""

    layers: tuple[int, ...]
    pages: Tensor
    """`[layers num_pages page_size *row]`."""

    @property
    def slots(self) -> Tensor:
        """The same storage as `[layers, num_pages · page_size, *row]`."""
        return self.pages.flatten(1, 2)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers of the plane."""
        row = self.pages[0, 0, 0]
        return len(self.layers) * row.numel() * row.element_size()


class PagedKVCache:
    """K/V of a batch of rows in pages, with prefixes shared between rows.

    Storage is one tensor per kind of row and group of equal layers: a commit is a few calls however many the layers.
    Lengths and page tables live on the host; the device copies are made when a window asks for them.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int = 16,
        growable: bool = False,
        kv_dtype: str | None = None,
        layer_scales: LayerScales | None = None,
    ) -> None:
        """Args:
        growable: a shortage of pages makes the storage grow by half at least, which copies it, and raises nothing.
        kv_dtype: `fp8_e4m3` or `int8` quantises the rows, with a scale per token and head; None stores them as they
            are.
        layer_scales: one K and V scale per layer instead of those, as a quantised checkpoint brings them.
        """
        if page_size not in PAGE_SIZES:
            raise ConfigError(f"page_size={page_size}; accepted: {', '.join(map(str, PAGE_SIZES))}")
        if num_pages < 1:
            raise ConfigError(f"num_pages={num_pages}; accepted: at least 1")
        self.page_size = page_size
        self.layers = tuple(layers)
        self.growable = growable
        self._format = (kv_dtype, None if layer_scales is None else tuple(layer_scales))
        self.allocator = BlockAllocator(num_pages)
        self.planes: list[Plane] = []
        self._codecs = make_codecs([shape.device for shape in self.layers], kv_dtype, layer_scales)
        self._places: list[tuple[list[Place], list[Place]]] = [([], []) for _ in self.layers]
        self._tables: list[list[int]] = []
        self._lengths: list[int] = []
        self._layouts: dict[tuple[int, ...], tuple[Tensor, tuple[int, ...] | None]] = {}
        for group in _alike(self.layers):
            shape = self.layers[group[0]]
            for which, size in enumerate((shape.k_size, shape.v_size)):
                codec = self._codecs[group[0]][which]
                for row, dtype in codec.parts(shape.num_kv_heads, size, shape.dtype):
                    for i, layer in enumerate(group):
                        self._places[layer][which].append((len(self.planes), i))
                    storage = torch.empty(len(group), num_pages, page_size, *row, dtype=dtype, device=shape.device)
                    self.planes.append(Plane(group, storage))
        self._pages = self._views()

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows ever added; freed ones are empty."""
        return len(self._tables)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K/V in all layers."""
        return sum(plane.bytes_per_token for plane in self.planes)

    def empty_like(self, num_pages: int) -> PagedKVCache:
        """A cache of the same format, without rows."""
        return PagedKVCache(self.layers, num_pages, self.page_size, self.growable, *self._format)

    def same_format(self, other: PagedKVCache) -> bool:
        """Whether pages of both hold the same things in the same way, so that they may be copied as they are."""
        mine, theirs = ((cache.layers, cache.page_size, cache._format) for cache in (self, other))
        return mine == theirs

    def add_row(self) -> int:
        """Add an empty row and return its number."""
        self._tables.append([])
        self._lengths.append(0)
        return self.num_rows - 1

    def length(self, row: int) -> int:
        """Committed tokens of a row."""
        return self._lengths[row]

    def pages_of(self, row: int) -> tuple[int, ...]:
        """Pages that a row holds, reserved ones included."""
        return tuple(self._tables[row])

    def fork(self, source: int) -> int:
        """Add a row that shares all committed pages of `source`; a shared tail is copied on the first write into it."""
        row = self.add_row()
        self.refork(source, row)
        return row

    def refork(self, source: int, row: int) -> None:
        """Make an empty row share all committed pages of `source`."""
        if self._tables[row]:
            raise CacheCorruption(f"row {row} holds pages; only an empty row can share those of row {source}")
        shared = self._tables[source][: self._pages_for(self._lengths[source])]
        self.allocator.share(shared)
        self._tables[row] = list(shared)
        self._lengths[row] = self._lengths[source]
        self._layouts.clear()

    def free_row(self, row: int) -> None:
        """Give the row's pages back; the row is empty then."""
        self.allocator.release(self._tables[row])
        self._tables[row] = []
        self._lengths[row] = 0
        self._layouts.clear()

    def free_all(self) -> None:
        """Give the pages of every row back."""
        for row in range(self.num_rows):
            self.free_row(row)

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens of a row from `length` on; its pages stay reserved, but those it shares are let go."""
        if not 0 <= length <= self._lengths[row]:
            raise ConfigError(f"truncate row {row}: length={length}; accepted: 0 to {self._lengths[row]}")
        behind = self._tables[row][self._pages_for(length) :]
        if any(self.allocator.references(page) > 1 for page in behind):
            # The row will write there again, and what other rows share it must not write.
            self.allocator.release(behind)
            self._tables[row] = self._tables[row][: self._pages_for(length)]
            self._layouts.clear()
        self._lengths[row] = length

    def advance(self, row: int, num_tokens: int) -> None:
        """Declare the `num_tokens` slots behind a row's end committed (writers call this after they wrote them)."""
        length = self._lengths[row] + num_tokens
        if length > len(self._tables[row]) * self.page_size:
            raise CacheCorruption(f"row {row}: {length} tokens in {len(self._tables[row])} pages of {self.page_size}")
        self._lengths[row] = length

    # -- room ---------------------------------------------------------------------------------------------------------

    def reserve(self, rows: Sequence[int], num_tokens: Sequence[int]) -> int:
        """Make sure that `num_tokens[i]` more tokens of `rows[i]` have slots of their own; all rows or none.

        Copies tail pages that are shared and would be written; returns the bytes copied.  Raises `OutOfPages`.
        """
        missing = [
            max(0, self._pages_for(self._lengths[row] + count) - len(self._tables[row]))
            for row, count in zip(rows, num_tokens, strict=True)
        ]
        shared = [row for row, count in zip(rows, num_tokens, strict=True) if count > 0 and self._tail_is_shared(row)]
        if sum(missing) == 0 and not shared:
            return 0
        # The last of the rows that share a tail page may keep it; one page for each is at most one too many.
        wanted = sum(missing) + len(shared)
        if self.growable and wanted > self.allocator.num_free:
            self.grow(max(wanted - self.allocator.num_free, self.allocator.num_pages // 2))
        if wanted > self.allocator.num_free:
            fits = self.allocator.num_free * self.page_size
            raise OutOfPages(
                f"{sum(num_tokens)} more tokens need {wanted} pages of {self.page_size}, "
                f"{self.allocator.num_free} of {self.allocator.num_pages} are free: {fits} tokens fit"
            )
        copied = sum(self._unshare_tail(row) for row in shared)
        for row, count in zip(rows, missing, strict=True):
            self._tables[row] += self.allocator.take(count)
        self._layouts.clear()
        return copied

    def grow(self, num_pages: int) -> None:
        """Add `num_pages` pages; the storage moves, so views of it are stale afterwards."""
        self.allocator.grow(num_pages)
        for i, plane in enumerate(self.planes):
            layers, old, *rest = plane.pages.shape
            storage = plane.pages.new_empty(layers, old + num_pages, *rest)
            storage[:, :old] = plane.pages
            self.planes[i] = Plane(plane.layers, storage)
        self._pages = self._views()

    # -- what writers and attention read ------------------------------------------------------------------------------

    def layer_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V pages of a layer, each `[num_pages page_size h d]`; codes where they are quantised."""
        (k_pages, _), (v_pages, _) = self._pages[layer]
        return k_pages, v_pages

    def layer_scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Scales of a layer's K and V, as `KVView` has them."""
        (_, k_scales), (_, v_scales) = self._pages[layer]
        return k_scales, v_scales

    def places(self, layer: int) -> tuple[Place, ...]:
        """Where the parts of a layer's K, and then of its V, are stored."""
        k_places, v_places = self._places[layer]
        return (*k_places, *v_places)

    def encode(self, layer: int, k: Float[Tensor, "b w h dk"], v: Float[Tensor, "b w h dv"]) -> tuple[Encoded, Encoded]:
        """K and V rows of a layer in the format of its pages; all parts together follow the order of `places`."""
        k_codec, v_codec = self._codecs[layer]
        return k_codec.encode(k), v_codec.encode(v)

    def slots(self, row: int, start: int, count: int) -> list[int]:
        """Slot numbers (page · page_size + offset) of the row's tokens `start .. start + count - 1`."""
        table, size = self._tables[row], self.page_size
        return [table[i // size] * size + i % size for i in range(start, start + count)]

    def layout(self, rows: tuple[int, ...], device: torch.device) -> PrefixLayout:
        """Page tables and lengths of some rows, as attention reads them."""
        if rows not in self._layouts:
            tables = [self._tables[row] for row in rows]
            width = max((len(table) for table in tables), default=0)
            table = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32).reshape(
                len(rows), width
            )
            self._layouts[rows] = (table.to(device), self._spans(tables))
        table, spans = self._layouts[rows]
        lengths = tuple(self._lengths[row] for row in rows)
        return PrefixLayout(table, torch.tensor(lengths, dtype=torch.int32, device=device), lengths, spans)

    def read(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Copies of a row's committed K and V in a layer, each `[length h d]`; for tests and for looking."""
        slots = self.slots(row, 0, self._lengths[row])
        dtype = self.layers[layer].dtype
        k, v = (
            decode_rows(codes.flatten(0, 1)[slots], select_scales(scales, slots), dtype)
            for codes, scales in self._pages[layer]
        )
        return k, v

    def check(self) -> None:
        """Raise `CacheCorruption` unless reference counts, tables and lengths agree."""
        self.allocator.check()
        held: dict[int, int] = {}
        for row, table in enumerate(self._tables):
            if self._lengths[row] > len(table) * self.page_size:
                raise CacheCorruption(
                    f"row {row}: {self._lengths[row]} tokens in {len(table)} pages of {self.page_size}"
                )
            for page in table:
                held[page] = held.get(page, 0) + 1
        for page in range(self.allocator.num_pages):
            if held.get(page, 0) != self.allocator.references(page):
                counted = self.allocator.references(page)
                raise CacheCorruption(f"page {page}: {held.get(page, 0)} rows hold it, the allocator counts {counted}")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _views(self) -> list[tuple[tuple[Tensor, Tensor | None], ...]]:
        def stored(places: list[Place]) -> list[Tensor]:
            return [self.planes[plane].pages[i] for plane, i in places]

        layers = zip(self._codecs, self._places, strict=True)
        return [
            tuple(codec.pages(stored(parts)) for codec, parts in zip(codecs, places, strict=True))
            for codecs, places in layers
        ]

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _tail_is_shared(self, row: int) -> bool:
        tail, offset = divmod(self._lengths[row], self.page_size)
        return offset > 0 and self.allocator.references(self._tables[row][tail]) > 1

    def _unshare_tail(self, row: int) -> int:
        tail, offset = divmod(self._lengths[row], self.page_size)
        shared = self._tables[row][tail]
        if self.allocator.references(shared) == 1:
            return 0
        [own] = self.allocator.take(1)
        for plane in self.planes:
            plane.pages[:, own, :offset] = plane.pages[:, shared, :offset]
        self.allocator.release([shared])
        self._tables[row][tail] = own
        return offset * self.bytes_per_token

    def _spans(self, tables: list[list[int]]) -> tuple[int, ...] | None:
        contiguous = all(table == list(range(table[0], table[0] + len(table))) for table in tables if table)
        return tuple(table[0] * self.page_size if table else 0 for table in tables) if contiguous else None


def _alike(layers: Sequence[LayerShape]) -> list[tuple[int, ...]]:
    groups: dict[LayerShape, list[int]] = {}
    for i, shape in enumerate(layers):
        groups.setdefault(shape, []).append(i)
    return [tuple(group) for group in groups.values()]
