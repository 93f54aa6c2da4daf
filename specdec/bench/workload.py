"""What is asked of the model: question files in Spec-Bench's format, and synthetic tasks.

A question file has one JSON object a line with `question_id`, `category` and `turns` (Xia et al. 2024, "Unlocking
Efficiency in Large Language Model Inference", arXiv:2401.07851); further keys are allowed and not looked at.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.config import require_int
from specdec.errors import ConfigError

COPY_CATEGORY = "copying"


@dataclass(frozen=True)
class Question:
    """One conversation to have: what the user says in each turn."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def read_questions(path: Path | str, limit: int | None = None) -> list[Question]:
    """Read a question file, or its first `limit` questions.

    Raises `ConfigError`, naming file, line and key, for anything that is not in the format.
    """
    if limit is not None:
        require_int("limit", limit, 1, None)
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"prompts={str(path)!r} is no file; accepted: a file of JSON lines (question_id, category, turns)"
        )
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() would split at U+2028 too
    except UnicodeDecodeError as failure:
        raise ConfigError(f"{path} is not UTF-8 text: {failure.reason} at byte {failure.start}") from failure
    questions: list[Question] = []
    seen: dict[int | str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        question = parse_question(line, f"{path}, line {number}")
        if question.question_id in seen:
            first = seen[question.question_id]
            raise ConfigError(f"{path}, line {number}: question_id {question.question_id!r} stands in line {first} too")
        seen[question.question_id] = number
        questions.append(question)
        if len(questions) == limit:
            break
    if not questions:
        raise ConfigError(f"{path} holds no question")
    return questions


def parse_question(line: str, where: str) -> Question:
    """One line of a question file; `where` begins the message of the `ConfigError` that a bad line raises."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as failure:
        raise ConfigError(f"{where}: no JSON: {failure.msg} at column {failure.colno}") from failure
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: a JSON {type(entry).__name__}; accepted: an object")
    for key in ("question_id", "category", "turns"):
        if key not in entry:
            raise ConfigError(f"{where}: key {key!r} is missing; found: {', '.join(entry) or 'none'}")
    turns = entry["turns"]
    _require(where, "question_id", entry["question_id"], (int, str), "an integer or a string")
    _require(where, "category", entry["category"], (str,), "a string that is not empty")
    _require(where, "turns", turns, (list,), "a list of strings, at least one")
    for i, turn in enumerate(turns):
        _require(where, f"turns[{i}]", turn, (str,), "a string that is not empty")
    return Question(entry["question_id"], entry["category"], tuple(turns))


def _require(where: str, key: str, value: Any, kinds: tuple[type, ...], accepted: str) -> None:
    blank = isinstance(value, (str, list)) and not (value.strip() if isinstance(value, str) else value)
    if not isinstance(value, kinds) or isinstance(value, bool) or blank:
        raise ConfigError(f"{where}: {key} is {value!r}; accepted: {accepted}")


def copying_questions(
    tokenizer: PreTrainedTokenizerBase, count: int, num_tokens: int = 200, seed: int = 0
) -> list[Question]:
    """Tasks to repeat a passage with one word changed: what lookup drafters are best at.

    The passages are shuffled from a stock of sentences, whole ones, as many as fit into `num_tokens` tokens.
    """
    require_int("count", count, 1, None)
    rng = random.Random(seed)
    questions = []
    for number in range(count):
        passage = _passage(tokenizer, rng, num_tokens)
        old, new = rng.choice(_swaps_in(passage))
        order = (
            f'Repeat the following text word for word, but write "{new}" in place of "{old}". '
            f"Answer with the text alone.\n\n{passage}"
        )
        questions.append(Question(f"copy-{number}", COPY_CATEGORY, (order,)))
    return questions


def _passage(tokenizer: PreTrainedTokenizerBase, rng: random.Random, num_tokens: int) -> str:
    sentences = rng.sample(SENTENCES, len(SENTENCES))
    passage = sentences[0]
    for sentence in sentences[1:]:
        longer = f"{passage} {sentence}"
        if len(tokenizer(longer, add_special_tokens=False)["input_ids"]) > num_tokens:
            break
        passage = longer
    return passage


def _swaps_in(passage: str) -> list[tuple[str, str]]:
    # Every sentence has a word of its own among them, so that there is always one to choose.
    words = Counter(re.findall(r"\w+", passage))
    return [(old, new) for old, new in SWAPS if words[old] == 1]


def encode_turn(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], answers: Sequence[str], chat: bool = True
) -> list[int]:
    """Token ids of a conversation up to the model's next answer: `turns` are the user's, one more than `answers`.

    Without `chat` the texts stand behind each other, separated by blank lines.  Raises `ConfigError` where the
    tokenizer has no chat template.
    """
    if len(turns) != len(answers) + 1:
        raise ConfigError(f"{len(turns)} turns and {len(answers)} answers; accepted: one turn more than answers")
    if not chat:
        texts = [text for pair in zip(turns, answers, strict=False) for text in pair]
        return tokenizer("\n\n".join([*texts, turns[-1]]))["input_ids"]
    if tokenizer.chat_template is None:
        raise ConfigError("the model's tokenizer has no chat template; accepted: --no-chat")
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return encoded["input_ids"]


SENTENCES = (
    "The old ferry left the harbour before sunrise, carrying letters, apples and two sleepy dogs.",
    "A narrow path runs behind the mill and climbs through the orchard to the upper road.",
    "Nobody in the village could remember who had planted the three tall poplars.",
    "On market days the baker sells out of rye bread long before noon.",
    "The clockmaker keeps a drawer full of tiny springs, each wrapped in blue paper.",
    "When the river froze, children skated all the way to the stone bridge.",
    "Her grandmother used to say that a garden forgives every mistake but haste.",
    "The teacher drew a map of the island on the blackboard and marked the lighthouse in red.",
    "Two engineers measured the bridge every spring and wrote the numbers into a green book.",
    "After the storm the beach was covered with driftwood, shells and pieces of rope.",
    "The library closes at six, but the librarian often stays until the last reader has gone.",
    "A small orchestra practised in the town hall every Thursday evening.",
    "The train to the coast stops at nine stations and crosses four rivers.",
    "He repaired the wooden boat with pine planks and a great deal of patience.",
    "In late summer the hills turn yellow and the wells run low.",
    "The painter mixed her own colours from clay, chalk and crushed leaves.",
    "Every winter the shepherd counted his flock twice, once by day and once by lantern light.",
    "The post office moved into the old school, and the bell still rings at eight.",
    "A traveller asked for the shortest way to the castle and was sent the longest.",
    "The museum shows a single coin that was found under the kitchen floor.",
    "They planted beans along the fence and lettuce in the shade of the wall.",
    "The blacksmith's daughter became an astronomer and named a comet after her father.",
    "At the edge of the forest stands a hut with a red door and no windows.",
    "The cook wrote down every recipe except the one that everybody asked for.",
)

SWAPS = (
    ("bridge", "tunnel"),
    ("river", "canal"),
    ("village", "valley"),
    ("garden", "kitchen"),
    ("island", "mountain"),
    ("train", "wagon"),
    ("library", "theatre"),
    ("castle", "palace"),
    ("museum", "market hall"),
    ("orchard", "meadow"),
    ("forest", "desert"),
    ("harbour", "station"),
    ("hills", "fields"),
    ("town", "city"),
    ("coast", "capital"),
    ("baker", "grocer"),
    ("storm", "parade"),
    ("shepherd", "farmer"),
    ("teacher", "captain"),
    ("painter", "weaver"),
    ("engineers", "sailors"),
    ("boat", "cart"),
    ("cook", "doctor"),
    ("comet", "ship"),
    ("fence", "hedge"),
    ("poplars", "willows"),
    ("clockmaker", "jeweller"),
    ("ferry", "barge"),
    ("letters", "barrels"),
    ("office", "stable"),
    ("orchestra", "choir"),
)
