"""Text that a model writes to itself: template pieces, forced and free columns, roles, loops, and batches of it."""

from __future__ import annotations

import pytest
import torch

from specdec.errors import ConfigError, UnsupportedError
from specdec.hf.lockstep import LockstepModel
from specdec.hf.teacher import TeacherModel
from specdec.hf.tiny import END, tiny_model
from specdec.train.chat import OPENERS, SYSTEM_PROMPTS, chat_pieces
from specdec.train.data import Corpus, first_replies, load_rounds, save_round
from specdec.train.selftalk import (
    REPLY,
    USER,
    Rows,
    SelfTalkConfig,
    end_of_turn_ids,
    looping,
    opening_rows,
    pick_tokens_torch,
    talk,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny():
    return tiny_model()


@pytest.fixture(scope="module")
def rows(tiny) -> Rows:
    model, tokenizer = tiny
    pieces = chat_pieces(tokenizer)
    config = SelfTalkConfig(length=80, max_user_tokens=12, max_reply_tokens=20, system_share=0.3, seeded_share=0.5)
    openings = opening_rows(pieces, tokenizer, 24, config, seed=1)
    step = LockstepModel(model, 24, config.length).step
    return talk(step, pick_tokens_torch, openings, pieces, [END], config, 1, CPU)


def test_lockstep_logits_are_the_models(tiny):
    model, _ = tiny
    tokens = torch.randint(257, (3, 20))
    lockstep = LockstepModel(model, 3, 24)
    with torch.no_grad():
        whole = model(tokens).logits
    for column in range(20):
        assert torch.allclose(lockstep.step(tokens[:, column], column), whole[:, column], atol=1e-4)
    with pytest.raises(ConfigError, match="position=24"):
        lockstep.step(tokens[:, 0], 24)


@pytest.mark.parametrize("compiled", [False, True])
def test_teacher_gives_layer_inputs_and_logits_and_leaves_the_model_alone(tiny, compiled: bool, monkeypatch):
    model, _ = tiny
    if compiled:  # the wiring is under test, not Inductor
        monkeypatch.setattr(
            torch, "compile", lambda function, **options: lambda *args, **kwargs: function(*args, **kwargs)
        )
    tokens = torch.randint(257, (2, 9))
    with torch.no_grad():
        wanted = model(tokens, output_hidden_states=True)
    taps, logits = TeacherModel(model, (1, 3, -1), 16, compiled)(tokens)
    assert torch.allclose(logits, wanted.logits, atol=1e-5)
    for tap, layer in zip(taps, (1, 3, -1), strict=True):
        assert torch.allclose(tap, wanted.hidden_states[layer], atol=1e-5)
    assert all("forward" not in layer.__dict__ for layer in model.model.layers)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, wanted.logits)


def test_every_row_is_a_conversation_of_the_template(tiny, rows: Rows):
    _, tokenizer = tiny
    pieces = chat_pieces(tokenizer)
    limits = {USER: 12, REPLY: 20}
    for tokens, roles in zip(rows.tokens.tolist(), rows.roles.tolist(), strict=True):
        column = next(i for i, role in enumerate(roles) if role)
        assert roles[column] == USER
        speaker = USER
        while column < len(tokens):
            spoken = 0
            while column < len(tokens) and roles[column] == speaker:
                spoken, column = spoken + 1, column + 1
            bridge = [END, *(pieces.after_user if speaker == USER else pieces.after_reply)]
            bridge = bridge[1:] if bridge[1] == END else bridge
            said_end = tokens[column - 1] == END
            assert spoken <= limits[speaker]
            if column == len(tokens):
                break
            assert said_end or spoken == limits[speaker]
            forced = bridge[1:] if said_end else bridge
            there = tokens[column : column + len(forced)]
            assert there == forced[: len(there)] and not any(roles[column : column + len(forced)])
            column, speaker = column + len(forced), USER + REPLY - speaker


def test_openings_follow_the_shares(tiny):
    _, tokenizer = tiny
    pieces = chat_pieces(tokenizer)
    plain = opening_rows(pieces, tokenizer, 50, SelfTalkConfig(seeded_share=0, system_share=0), 0)
    assert {tuple(row) for row in plain} == {pieces.opening}
    all_seeded = opening_rows(pieces, tokenizer, 50, SelfTalkConfig(seeded_share=1, system_share=1), 0)
    texts = [tokenizer.decode(row) for row in all_seeded]
    assert all(any(prompt in text for prompt in SYSTEM_PROMPTS) for text in texts)
    assert all(text.endswith(OPENERS) for text in texts)
    assert len(set(texts)) > 30


def test_greedy_rows_are_greedy_and_equal_seeds_give_equal_text(tiny, rows: Rows):
    model, tokenizer = tiny
    pieces = chat_pieces(tokenizer)
    config = SelfTalkConfig(length=80, max_user_tokens=12, max_reply_tokens=20, system_share=0.3, seeded_share=0.5)
    openings = opening_rows(pieces, tokenizer, 24, config, seed=1)
    step = LockstepModel(model, 24, config.length).step
    again = talk(step, pick_tokens_torch, openings, pieces, [END], config, 1, CPU)
    assert torch.equal(again.tokens, rows.tokens)
    with torch.no_grad():
        best = model(rows.tokens.long()).logits.argmax(-1)
    replied = (rows.roles == REPLY)[:, 1:]
    greedy = (best[:, :-1] == rows.tokens[:, 1:])[replied & rows.greedy[:, None]]
    sampled = (best[:, :-1] == rows.tokens[:, 1:])[replied & ~rows.greedy[:, None]]
    assert greedy.all() and not sampled.all()


def test_loops_are_found_from_their_third_turn_on():
    tokens = torch.cat([torch.arange(20), torch.tensor([50, 51, 52, 53, 54]).repeat(12), torch.arange(30, 40)])[None]
    found = looping(tokens)[0]
    assert not found[: 20 + 32].any()
    assert found[20 + 5 + 32 : 80].all()
    assert not found[80:].any()


def test_corpus_keeps_greedy_rows_apart_and_batches_depend_on_seed_and_number_alone(rows: Rows, tmp_path):
    save_round(tmp_path, 0, rows)
    save_round(tmp_path, 1, rows)
    both = load_rounds(tmp_path, CPU)
    assert len(both.tokens) == 48
    corpus = Corpus.of(both, held_out=4)
    assert len(corpus.held_out.tokens) == 4 and corpus.held_out.greedy.all() and len(corpus.tokens) == 44
    batches = corpus.batches(8, 100, seed=3, first=0)
    taken = [next(batches) for _ in range(8)]
    resumed = corpus.batches(8, 100, seed=3, first=6)
    for batch in taken[6:]:
        again = next(resumed)
        assert torch.equal(batch.tokens, again.tokens) and torch.equal(batch.places, again.places)
    chosen = {tuple(row) for batch in taken[:5] for row in batch.tokens.tolist()}
    assert len(chosen) >= 20  # one epoch has five batches, of 40 of the 44 rows (each row stands twice)
    flags = {tuple(row): flag for row, flag in zip(corpus.tokens.tolist(), corpus.chosen_next, strict=True)}
    for batch in taken:
        wanted = torch.stack([flags[tuple(row)] for row in batch.tokens.tolist()]).flatten()
        assert torch.equal(wanted[batch.places].float(), batch.weights)


def test_first_replies_are_whole(rows: Rows):
    start, end = first_replies(rows)
    for roles, first, behind in zip(rows.roles, start.tolist(), end.tolist(), strict=True):
        assert (roles[first:behind] == REPLY).all()
        assert behind == len(roles) or roles[behind] != REPLY
        assert (roles[:first] != REPLY).all()


def test_a_tokenizer_without_template_is_refused(tiny):
    _, tokenizer = tiny
    kept, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(UnsupportedError, match=r"no chat template.*--prompts"):
            chat_pieces(tokenizer)
    finally:
        tokenizer.chat_template = kept


def test_ends_of_turns():
    assert end_of_turn_ids(None, [5, 7], ()) == [5, 7]
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        end_of_turn_ids(None, None, ())
