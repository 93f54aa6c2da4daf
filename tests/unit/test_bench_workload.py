"""Question files and synthetic tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specdec.bench.workload import (
    COPY_CATEGORY,
    SENTENCES,
    SWAPS,
    Question,
    copying_questions,
    encode_turn,
    read_questions,
)
from specdec.errors import ConfigError
from tests.models import byte_tokenizer

GOOD = {"question_id": 81, "category": "writing", "turns": ["Say hello.", "Again."], "reference": ["x"]}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "questions.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_reads_questions_in_order_and_skips_blank_lines(tmp_path: Path) -> None:
    other = {"question_id": "b-1", "category": "maths", "turns": ["Größe?\u2028eins"]}
    path = write(tmp_path, GOOD, "", other, "  ")
    expected = [Question(81, "writing", ("Say hello.", "Again.")), Question("b-1", "maths", ("Größe?\u2028eins",))]
    assert read_questions(path) == expected
    assert read_questions(str(path), limit=1) == expected[:1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nonsense", "line 2: no JSON"),
        ("[1, 2]", "line 2: a JSON list; accepted: an object"),
        ({"question_id": 1, "turns": ["a"]}, "'category' is missing; found: question_id, turns"),
        ({**GOOD, "question_id": None}, "question_id is None; accepted: an integer or a string"),
        ({**GOOD, "question_id": True}, "question_id is True"),
        ({**GOOD, "question_id": 1, "category": " "}, "category is ' '"),
        ({**GOOD, "question_id": 1, "turns": []}, r"turns is \[\]; accepted: a list of strings"),
        ({**GOOD, "question_id": 1, "turns": "hello"}, "turns is 'hello'"),
        ({**GOOD, "question_id": 1, "turns": ["a", 5]}, r"turns\[1\] is 5"),
        ({**GOOD, "question_id": 1, "turns": ["a", ""]}, r"turns\[1\] is ''"),
        (GOOD, "line 2: question_id 81 stands in line 1 too"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(ConfigError, match=message) as caught:
        read_questions(path)
    assert str(path) in str(caught.value)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file"):
        read_questions(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="holds no question"):
        read_questions(write(tmp_path, "", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"category": "\xfc"}')
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_questions(tmp_path / "latin.jsonl")
    with pytest.raises(ConfigError, match="limit=0"):
        read_questions(write(tmp_path, GOOD), limit=0)


def test_copying_tasks_ask_for_one_changed_word() -> None:
    tokenizer = byte_tokenizer()
    tasks = copying_questions(tokenizer, 20, num_tokens=400, seed=3)
    assert len({task.question_id for task in tasks}) == len({task.turns for task in tasks}) == 20
    for task in tasks:
        assert task.category == COPY_CATEGORY
        order, passage = task.turns[0].split("\n\n")
        new, old = re.findall(r'"(.*?)"', order)
        assert (old, new) in SWAPS
        assert len(re.findall(rf"\b{old}\b", passage)) == 1
        assert 250 < len(tokenizer(passage)["input_ids"]) <= 400
    assert copying_questions(tokenizer, 20, num_tokens=400, seed=3) == tasks
    assert copying_questions(tokenizer, 20, num_tokens=400, seed=4) != tasks


def test_every_sentence_has_a_word_to_change() -> None:
    stock = re.findall(r"\w+", " ".join(SENTENCES))
    once = {old for old, _ in SWAPS if stock.count(old) == 1}
    for sentence in SENTENCES:
        assert once & set(re.findall(r"\w+", sentence)), sentence


def test_turns_are_encoded_with_the_answers_between_them() -> None:
    tokenizer = byte_tokenizer()
    first = tokenizer.decode(encode_turn(tokenizer, ["Hello?"], []))
    assert first == "user: Hello?\nassistant: "
    second = tokenizer.decode(encode_turn(tokenizer, ["Hello?", "More!"], ["Hi."]))
    assert second == "user: Hello?\nassistant: Hi.\nuser: More!\nassistant: "
    plain = tokenizer.decode(encode_turn(tokenizer, ["Hello?", "More!"], ["Hi."], chat=False))
    assert plain == "Hello?\n\nHi.\n\nMore!"


def test_a_turn_without_its_history_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 turns and 0 answers"):
        encode_turn(byte_tokenizer(), ["a", "b"], [])


def test_chat_needs_a_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="--no-chat"):
        encode_turn(tokenizer, ["a"], [])
