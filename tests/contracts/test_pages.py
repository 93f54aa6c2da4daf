"""Invariants 2 to 5: what stands in the pages, and what never does."""

from __future__ import annotations

import hashlib

import pytest
import torch

from specdec import DeferredWriter, HFTarget, PagedKVCache, Sampler, SpeculativeDecoder, Verdict, Window
from specdec.types import Draft
from tests.models import VOCAB, tiny_llama, tiny_mistral
from tests.systems import DRAFTERS, GREEDY, SAMPLED, WRITERS, Recorder, continuation, plain, prompts


def decoder_for(model, truth, drafter, recorder):
    return SpeculativeDecoder(HFTarget(model), DRAFTERS[drafter](truth, VOCAB), recorder)


def plain_rows(model, tokens):
    """K/V that one plain forward gives for a whole row, as a list of (k, v) per layer."""
    target = HFTarget(model)
    cache = PagedKVCache(target.layers, 64)
    writer = DeferredWriter(cache)
    cache.add_row()
    window = Window.chain([tokens], (0,), (0,), "cpu")
    writer.begin(window)
    target.forward(window, writer)
    writer.commit(Verdict.keep_all(window, torch.zeros(1, dtype=torch.long)))
    return [cache.read(layer, 0) for layer in range(len(target.layers))]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("drafter", ["right", "wrong", "late-wrong-tree", "mixed-tree"])
def test_committed_pages_hold_what_plain_decoding_stores(drafter, writer):
    # Matrix products round by the shape of the window, so a model's rows agree closely; `test_writers` has them exact.
    model, inputs = tiny_llama(), prompts(3, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=20)
    recorder = Recorder(writer)
    decoder = decoder_for(model, truth, drafter, recorder)
    sampler = Sampler(inputs["input_ids"])
    with decoder.start(**inputs, sampler=sampler, max_length=29) as run:
        for _ in range(3):
            decoder.step(run)
        for row in range(3):
            length = run.cache.length(row)
            assert length == len(run.tokens[row]) - 1
            for layer, (k, v) in enumerate(plain_rows(model, run.tokens[row][:length])):
                stored_k, stored_v = run.cache.read(layer, row)
                torch.testing.assert_close(stored_k, k, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(stored_v, v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("make", [tiny_llama, tiny_mistral])
def test_uncommitted_slots_are_never_read(make, writer, sampling):
    model, inputs = make(), prompts(3, VOCAB)
    options = {**sampling, "max_new_tokens": 20}
    expected = plain(model, inputs, **options)
    truth = expected[:, 9:].tolist()
    for num_rows in (1, 3):
        some = {name: value[:num_rows] for name, value in inputs.items()}
        recorder = Recorder(writer, prepare=poison)
        torch.manual_seed(0)
        output = _generate_with(recorder, model, some, DRAFTERS["mixed-tree"](truth, VOCAB), **options)
        assert output.tolist() == plain(model, some, **options).tolist()


def poison(cache: PagedKVCache) -> None:
    """Fill every slot with NaN."""
    for plane in cache.planes:
        plane.pages.fill_(float("nan"))


def _generate_with(recorder, model, inputs, drafter, **options):
    """`model.generate` through a decoder whose writer is `recorder`."""
    from specdec.hf import generate as module

    method = module.custom_generate(drafter=drafter, writer=recorder)
    return model.generate(**inputs, custom_generate=method, pad_token_id=0, **options)


@pytest.mark.parametrize("drafter", ["wrong", "late-wrong-tree", "mixed-tree"])
def test_a_rejected_row_never_touches_a_page_under_the_deferred_writer(drafter):
    model, inputs = tiny_llama(), prompts(3, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=20)
    decoder = decoder_for(model, truth, drafter, Recorder("deferred", prepare=poison))
    sampler = Sampler(inputs["input_ids"])
    with decoder.start(**inputs, sampler=sampler, max_length=29) as run:
        for _ in range(4):
            record = decoder.step(run)
            assert record.commit.rows_committed < record.commit.rows_staged
            committed = {slot for row in range(3) for slot in run.cache.slots(row, 0, run.cache.length(row))}
            for plane in run.cache.planes:
                written = ~plane.slots.isnan().flatten(2).any(-1)
                for layer in written:
                    assert set(layer.nonzero().flatten().tolist()) == committed
            assert record.commit.bytes_written == record.commit.rows_committed * run.cache.bytes_per_token


def test_the_direct_writer_counts_every_write():
    model, inputs = tiny_llama(), prompts(1, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=20)
    decoder = decoder_for(model, truth, "late-wrong-tree", Recorder("direct"))
    with decoder.start(**inputs, sampler=Sampler(inputs["input_ids"]), max_length=29) as run:
        record = decoder.step(run)
        moved = sum(node != depth for depth, node in enumerate([0, *record.accepted_nodes[0]]))
        assert moved > 0
        written = record.commit.rows_staged + moved
        assert record.commit.bytes_written == written * run.cache.bytes_per_token


@pytest.mark.parametrize("writer", WRITERS)
def test_shared_pages_are_never_dirtied(writer):
    model = tiny_llama()
    ids = torch.randint(3, VOCAB, (1, 38), generator=torch.Generator().manual_seed(0)).expand(3, -1).contiguous()
    truth = continuation(model, {"input_ids": ids}, max_new_tokens=20)
    decoder = decoder_for(model, truth, "mixed-tree", Recorder(writer))
    sampler = Sampler(ids)
    with decoder.start(ids, sampler=sampler, max_length=58) as run:
        shared = run.cache.pages_of(0)[:2]  # 37 committed tokens in pages of 16: two full pages, one shared tail
        assert all(run.cache.pages_of(row)[:2] == shared for row in range(3))
        assert [run.cache.allocator.references(page) for page in shared] == [3, 3]
        before = digest(run.cache, shared)
        tail = [run.cache.read(0, row)[0][32:37].clone() for row in range(3)]
        while sampler.active_rows:
            decoder.step(run)
            assert digest(run.cache, shared) == before
        assert len({run.cache.pages_of(row)[2] for row in range(3)}) == 3, "a tail that is written is the row's own"
        for row in range(3):
            assert torch.equal(run.cache.read(0, row)[0][32:37], tail[row])
    assert sampler.emitted == truth


def digest(cache: PagedKVCache, pages) -> str:
    content = b"".join(plane.pages[:, list(pages)].numpy().tobytes() for plane in cache.planes)
    return hashlib.sha256(content).hexdigest()


def test_equal_prompts_are_stored_once():
    model, inputs = tiny_llama(), prompts(1, VOCAB, length=40)
    twice = {name: value.repeat(2, 1) for name, value in inputs.items()}
    target = HFTarget(model)
    for rows, batch in ((1, inputs), (2, twice)):
        with SpeculativeDecoder(target).start(**batch, sampler=Sampler(batch["input_ids"]), max_length=60) as run:
            held = run.cache.allocator.num_pages - run.cache.allocator.num_free
            assert held == 3, f"39 tokens in pages of 16 for {rows} rows"


@pytest.mark.parametrize("writer", WRITERS)
def test_all_pages_are_back_after_every_generate(writer):
    model, inputs = tiny_llama(), prompts(3, VOCAB)
    for options in (GREEDY, SAMPLED, {"do_sample": True, "num_return_sequences": 4}):
        recorder = Recorder(writer)
        _generate_with(recorder, model, inputs, "suffix", max_new_tokens=20, **options)
        [cache] = recorder.caches
        assert cache.allocator.num_free == cache.allocator.num_pages
        cache.check()


@pytest.mark.parametrize("width", [1, 2, 8, 33])
def test_equal_windows_give_bit_identical_logits_from_every_writer(width):
    model = tiny_llama()
    target = HFTarget(model)
    generator = torch.Generator().manual_seed(width)
    found = []
    nodes = [
        (int(token), max(0, i - i % 3))
        for i, token in enumerate(torch.randperm(VOCAB, generator=generator)[: width - 1])
    ]
    for name in WRITERS:
        cache = PagedKVCache(target.layers, 32)
        writer = WRITERS[name](cache)
        cache.add_row(), cache.add_row()
        prompt = Window.chain([list(range(3, 20)), list(range(5, 12))], (0, 1), (0, 0), "cpu")
        writer.begin(prompt)
        target.forward(prompt, writer)
        writer.commit(Verdict.keep_all(prompt, torch.tensor([20, 12])))
        window = Window.over(torch.tensor([20, 12]), Draft.trees([nodes, nodes[: width // 2]]), (0, 1), (17, 7))
        writer.begin(window)
        found.append(target.forward(window, writer).logits)
        writer.abort()
    assert all(torch.equal(found[0], logits) for logits in found[1:])
