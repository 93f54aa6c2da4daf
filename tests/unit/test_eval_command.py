"""`specdec eval`: the table, the recommendation, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

from specdec.bench.acceptance import Setting
from specdec.bench.eval import Line, as_text, eval_command, recommended
from specdec.hf.checkpoints import save_head
from specdec.hf.initial_head import HeadShape, initial_head
from specdec.hf.tiny import tiny_model
from specdec.train.acceptance import Tau


def test_measures_a_head_on_prompts(tmp_path: Path, capsys):
    model, tokenizer = tiny_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    save_head(initial_head(model, HeadShape()), tmp_path / "head", standalone=False)
    questions = [{"question_id": i, "category": "x", "turns": [f"hello {i}"]} for i in range(3)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, questions)))
    eval_command(
        str(tmp_path / "head"),
        tmp_path / "q.jsonl",
        model=str(tmp_path / "model"),
        limit=2,
        max_new_tokens=12,
        depth=3,
        top_k=4,
        device="cpu",
        output=tmp_path / "out",
    )
    shown = capsys.readouterr().out
    assert "chain 8" in shown and "tree 60" in shown and "Recommended here" in shown
    written = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert next(iter(written["settings"])) == "chain 1" and len(written["settings"]) == 12
    line = written["settings"]["tree 32"]
    assert abs(line["speedup"] - line["greedy"]["tau"] * line["plain_ms"] / line["step_ms"]) < 1e-3
    assert line["greedy"]["texts"] == 2 and len(line["sampled"]["by_position"]) == 3


def tau(value: float) -> Tau:
    return Tau(value, value, 10, 1, (10,), (5,))


def test_recommends_the_fastest_or_none():
    slow = Line(Setting("chain 1", 1), tau(1.5), tau(1.2), step_ms=20.0, plain_ms=10.0)
    fast = Line(Setting("tree 8", 3, 8, 4), tau(3.0), tau(2.0), step_ms=20.0, plain_ms=10.0)
    assert recommended([slow, fast]) is fast and fast.speedup == 1.5
    assert "tree 8 (width 4, depth 3, 7 nodes), 1.50 times" in as_text([slow, fast])
    assert recommended([slow]) is None
    assert "no drafts" in as_text([slow])
    untimed = Line(Setting("chain 1", 1), tau(1.5), tau(1.2))
    assert "Recommended" not in as_text([untimed])
