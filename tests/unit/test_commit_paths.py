"""Every way that kept rows go to their pages, against a plain gather."""

from __future__ import annotations

import pytest
import torch

from specdec import DeferredWriter, DirectWriter, Draft, PagedKVCache, Verdict, Window
from specdec.target import LayerShape
from specdec.types import CommitStats

CPU = torch.device("cpu")
LAYERS = (LayerShape(2, 4, 4, torch.float32, CPU),) * 3
WRITERS = {"deferred": DeferredWriter, "direct": DirectWriter}
CHAIN = [(token, i) for i, token in enumerate((11, 12, 13, 14))]
TREE = [(11, 0), (12, 0), (13, 1), (14, 2), (15, 2), (16, 5)]

CASES = {
    "nothing kept but the root": ([CHAIN], [[0]], "prefix"),
    "everything kept": ([CHAIN], [[0, 1, 2, 3, 4]], "prefix"),
    "contiguous prefix": ([CHAIN], [[0, 1, 2]], "prefix"),
    "no drafts at all": ([[]], [[0]], "prefix"),
    "tree": ([TREE], [[0, 2, 5, 6]], "gather"),
    "tree of which a chain is kept": ([TREE], [[0, 1, 3]], "gather"),
    "ragged batch, several depths": ([CHAIN, [], CHAIN[:2]], [[0, 1, 2, 3, 4], [0], [0, 1]], "gather"),
    "ragged trees": ([TREE, CHAIN, TREE[:3]], [[0, 2, 4], [0, 1], [0, 1, 3]], "gather"),
}


def staged_rows(window: Window, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(layer)
    shape = (*window.tokens.shape, 2, 4)
    return torch.randn(shape, generator=random), torch.randn(shape, generator=random)


def verdict_of(paths: list[list[int]]) -> Verdict:
    longest = max(map(len, paths))
    none = torch.zeros(len(paths), dtype=torch.long)
    padded = torch.tensor([path + [-1] * (longest - len(path)) for path in paths])
    return Verdict(padded, torch.tensor([len(path) for path in paths]), none, none.bool())


def commit(
    writer, window: Window, paths: list[list[int]]
) -> tuple[CommitStats, list[tuple[torch.Tensor, torch.Tensor]]]:
    writer.begin(window)
    rows = [staged_rows(window, layer) for layer in range(len(LAYERS))]
    for layer, (k, v) in enumerate(rows):
        writer.stage(layer, k, v)
    return writer.commit(verdict_of(paths)), rows


def prefilled(make, lengths: list[int], page_size: int) -> tuple[PagedKVCache, object]:
    """Rows with a context of some tokens, so that windows start in the middle of pages."""
    cache = PagedKVCache(LAYERS, 64, page_size)
    writer = make(cache)
    for length in lengths:
        row = cache.add_row()
        if length:
            window = Window.chain([[1] * length], (row,), (0,), CPU)
            commit(writer, window, [list(range(length))])
    return cache, writer


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("writer", WRITERS)
def test_pages_hold_the_plain_gather(writer, case, page_size):
    trees, paths, commit_path = CASES[case]
    lengths = [3, 0, 7][: len(trees)]
    cache, open_writer = prefilled(WRITERS[writer], lengths, page_size)
    window = Window.over(torch.tensor([10] * len(trees)), Draft.trees(trees), tuple(range(len(trees))), tuple(lengths))
    stats, rows = commit(open_writer, window, paths)
    for row, path in enumerate(paths):
        assert cache.length(row) == lengths[row] + len(path)
        for layer, staged in enumerate(rows):
            for stored, source in zip(cache.read(layer, row), staged, strict=True):
                assert torch.equal(stored[lengths[row] :], source[row, path])
    staged_count, kept = sum(len(tree) + 1 for tree in trees), sum(map(len, paths))
    assert (stats.rows_staged, stats.rows_committed, stats.rows_rejected) == (staged_count, kept, staged_count - kept)
    if writer == "deferred":
        assert stats.commit_path == commit_path
        assert stats.bytes_written == kept * cache.bytes_per_token
    else:
        assert stats.bytes_written >= staged_count * cache.bytes_per_token


@pytest.mark.parametrize("writer", WRITERS)
def test_rows_whose_pages_lie_scattered(writer):
    """The first and last slots are as far apart as if the pages lay in a row, but the middle page lies elsewhere."""
    cache, open_writer = prefilled(WRITERS[writer], [0, 0], 4)
    cache.reserve((0,), [12])
    cache.reserve((1,), [12])
    cache._tables[:] = [[0, 4, 2], [3, 1, 5]]
    window = Window.over(torch.tensor([10]), Draft.chains([list(range(11, 21))]), (0,), (0,))
    stats, rows = commit(open_writer, window, [list(range(11))])
    for layer, (k, v) in enumerate(rows):
        stored_k, stored_v = cache.read(layer, 0)
        assert torch.equal(stored_k, k[0]) and torch.equal(stored_v, v[0])
    if writer == "deferred":
        assert stats.commit_path == "gather"
    cache.check()


def test_a_prefix_goes_as_a_slice_and_a_batch_in_one_call_per_plane(monkeypatch):
    """Index work is done once per window, not once per layer or request."""
    cache, writer = prefilled(DeferredWriter, [3, 0, 7], 16)
    calls: list[str] = []
    original = torch.Tensor.__setitem__

    def counting(self, index, value):
        calls.append("index" if any(isinstance(part, torch.Tensor) for part in index) else "slice")
        return original(self, index, value)

    for trees, paths, kind in (([CHAIN], [[0, 1, 2]], "slice"), ([CHAIN, [], TREE], [[0, 1], [0], [0, 2, 5]], "index")):
        rows = tuple(range(len(trees)))
        lengths = tuple(cache.length(row) for row in rows)
        window = Window.over(torch.tensor([10] * len(trees)), Draft.trees(trees), rows, lengths)
        writer.begin(window)
        for layer in range(3):
            writer.stage(layer, *staged_rows(window, layer))
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__setitem__", counting)
            calls.clear()
            writer.commit(verdict_of(paths))
        assert calls == [kind] * len(cache.planes) and len(cache.planes) == 2
