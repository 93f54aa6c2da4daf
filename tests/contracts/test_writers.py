"""Every `KVWriter` on rows whose bits are known: what is committed, what is counted, and misuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import Draft, PagedKVCache, Verdict, Window
from specdec.errors import OutOfPages, WindowError
from specdec.target import LayerShape
from tests.systems import WRITERS

CPU = torch.device("cpu")
LAYERS = (
    LayerShape(2, 4, 4, torch.float32, CPU),
    LayerShape(1, 8, 4, torch.float32, CPU),  # a layer unlike the others, K and V of different sizes
    LayerShape(2, 4, 4, torch.float32, CPU),
)


def rows_for(window: Window, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V that say which token, at which position, in which layer they belong to; exact in fp32."""
    shape = LAYERS[layer]
    key = (window.tokens * 1000 + window.positions * 10 + layer).float()
    k = key[..., None, None] + torch.arange(shape.num_kv_heads * shape.k_size).view(shape.num_kv_heads, -1) / 64
    v = -key[..., None, None] - torch.arange(shape.num_kv_heads * shape.v_size).view(shape.num_kv_heads, -1) / 64
    return k, v


def stage_all(writer, window):
    return [writer.stage(layer, *rows_for(window, layer)) for layer in range(len(LAYERS))]


def expected_rows(tokens: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    window = Window.chain([tokens], (0,), (0,), CPU)
    k, v = rows_for(window, layer)
    return k[0], v[0]


@st.composite
def window_plans(draw):
    """For up to 4 rows and 4 steps: a random tree and a random path through it, per row."""
    num_rows = draw(st.integers(1, 4))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        rows = []
        for _ in range(num_rows):
            parents = [draw(st.integers(0, i)) for i in range(draw(st.integers(0, 9)))]
            path = [0]
            for node in range(1, len(parents) + 1):
                if parents[node - 1] == path[-1] and draw(st.booleans()):
                    path.append(node)
            rows.append((parents, path))
        steps.append(rows)
    prompt_lengths = [draw(st.integers(1, 20)) for _ in range(num_rows)]
    return prompt_lengths, steps, draw(st.sampled_from([1, 4, 16]))


@pytest.mark.parametrize("name", WRITERS)
@given(plan=window_plans())
@settings(max_examples=60, deadline=None)
def test_pages_hold_exactly_the_kept_rows(name, plan):
    prompt_lengths, steps, page_size = plan
    cache = PagedKVCache(LAYERS, 512, page_size)
    writer = WRITERS[name](cache)
    rows = tuple(cache.add_row() for _ in prompt_lengths)
    history = [[7 * row + i for i in range(length)] for row, length in zip(rows, prompt_lengths, strict=True)]
    prompt = Window.chain(history, rows, (0,) * len(rows), CPU)
    writer.begin(prompt)
    stage_all(writer, prompt)
    writer.commit(Verdict.keep_all(prompt, torch.zeros(len(rows), dtype=torch.long)))
    serial = 100
    for step in steps:
        trees = []
        for parents, _ in step:
            trees.append([((serial := serial + 1), parent) for parent in parents])
        roots = torch.tensor([serial + 1 + row for row in rows])
        serial += len(rows)
        window = Window.over(roots, Draft.trees(trees), rows, tuple(cache.length(row) for row in rows))
        writer.begin(window)
        stage_all(writer, window)
        longest = max(len(path) for _, path in step)
        verdict = Verdict(
            path=torch.tensor([path + [-1] * (longest - len(path)) for _, path in step]),
            num_kept=torch.tensor([len(path) for _, path in step]),
            next_tokens=torch.zeros(len(rows), dtype=torch.long),
            stopped=torch.zeros(len(rows), dtype=torch.bool),
        )
        stats = writer.commit(verdict)
        for row, (_, path) in zip(rows, step, strict=True):
            history[row] += window.tokens[row, path].tolist()
        assert stats.rows_committed == sum(len(path) for _, path in step)
        assert stats.rows_staged == sum(len(parents) + 1 for parents, _ in step)
        if name == "deferred":
            assert stats.bytes_written == stats.rows_committed * cache.bytes_per_token
        cache.check()
    for row in rows:
        assert cache.length(row) == len(history[row])
        for layer in range(len(LAYERS)):
            for stored, wanted in zip(cache.read(layer, row), expected_rows(history[row], layer), strict=True):
                assert torch.equal(stored, wanted)
    cache.free_all()
    assert cache.allocator.num_free == cache.allocator.num_pages


def open_window(name, num_pages=8):
    cache = PagedKVCache(LAYERS, num_pages, 4)
    writer = WRITERS[name](cache)
    cache.add_row()
    return cache, writer, Window.over(torch.tensor([5]), Draft.chains([[6, 7]]), (0,), (0,))


@pytest.mark.parametrize("name", WRITERS)
class TestMisuse:
    def test_stage_and_commit_need_a_window(self, name):
        _, writer, window = open_window(name)
        with pytest.raises(WindowError, match="stage without begin"):
            writer.stage(0, *rows_for(window, 0))
        with pytest.raises(WindowError, match="commit without begin"):
            writer.commit(verdict_of([0]))
        writer.abort()

    def test_a_window_is_begun_once(self, name):
        _, writer, window = open_window(name)
        writer.begin(window)
        with pytest.raises(WindowError, match="window is open"):
            writer.begin(window)

    def test_a_layer_is_staged_once(self, name):
        _, writer, window = open_window(name)
        writer.begin(window)
        writer.stage(1, *rows_for(window, 1))
        with pytest.raises(WindowError, match="layer 1 is staged twice"):
            writer.stage(1, *rows_for(window, 1))

    def test_layers_exist(self, name):
        _, writer, window = open_window(name)
        writer.begin(window)
        with pytest.raises(WindowError, match="stage of layer 3; accepted: 0 to 2"):
            writer.stage(3, *rows_for(window, 0))

    def test_rows_fit_the_layer(self, name):
        _, writer, window = open_window(name)
        writer.begin(window)
        with pytest.raises(WindowError, match="layer 1: k is"):
            writer.stage(1, *rows_for(window, 0))
        with pytest.raises(WindowError, match="layer 0: v is"):
            k, v = rows_for(window, 0)
            writer.stage(0, k, v.double())

    def test_no_layer_may_be_missing(self, name):
        cache, writer, window = open_window(name)
        writer.begin(window)
        writer.stage(0, *rows_for(window, 0))
        writer.stage(2, *rows_for(window, 2))
        with pytest.raises(WindowError, match="without the rows of layer 1"):
            writer.commit(verdict_of([0]))
        assert cache.length(0) == 0

    def test_a_window_is_committed_once(self, name):
        _, writer, window = open_window(name)
        writer.begin(window)
        stage_all(writer, window)
        writer.commit(verdict_of([0, 1]))
        with pytest.raises(WindowError, match="commit without begin"):
            writer.commit(verdict_of([0, 1]))

    @pytest.mark.parametrize("path", [[1], [0, 3], [0, -1]])
    def test_the_verdict_is_of_this_window(self, name, path):
        cache, writer, window = open_window(name)
        writer.begin(window)
        stage_all(writer, window)
        with pytest.raises(WindowError, match="leaves the window"):
            writer.commit(verdict_of(path))
        assert cache.length(0) == 0

    def test_the_verdict_has_the_windows_rows(self, name):
        _, writer, window = open_window(name)
        writer.begin(window)
        stage_all(writer, window)
        with pytest.raises(WindowError, match="verdict of 2 rows on a window of 1"):
            writer.commit(verdict_of([0], [0]))

    def test_the_windows_lengths_are_the_caches(self, name):
        _, writer, _ = open_window(name)
        with pytest.raises(WindowError, match="context length 3; the cache holds 0"):
            writer.begin(Window.over(torch.tensor([5]), Draft.chains([[6]]), (0,), (3,)))

    def test_no_page_is_taken_when_they_do_not_suffice(self, name):
        cache, writer, _ = open_window(name, num_pages=1)
        window = Window.over(torch.tensor([5]), Draft.chains([[6, 7, 8, 9]]), (0,), (0,))
        with pytest.raises(OutOfPages, match="4 tokens fit"):
            writer.begin(window)
        assert cache.allocator.num_free == 1
        cache.check()

    def test_an_abort_leaves_nothing(self, name):
        cache, writer, window = open_window(name)
        writer.begin(window)
        stage_all(writer, window)
        writer.abort()
        assert cache.length(0) == 0
        writer.begin(window)
        stage_all(writer, window)
        assert writer.commit(verdict_of([0, 1, 2])).rows_committed == 3


def verdict_of(*paths: list[int]) -> Verdict:
    none = torch.zeros(len(paths), dtype=torch.long)
    return Verdict(torch.tensor(paths), torch.tensor([len(path) for path in paths]), none, none.bool())


def test_direct_writes_what_deferred_does_not():
    written = {}
    for name in WRITERS:
        _, writer, window = open_window(name)
        writer.begin(window)
        stage_all(writer, window)
        written[name] = writer.commit(verdict_of([0])).bytes_written
    assert written["direct"] == 3 * written["deferred"]
