"""The whole pipeline on the tiny model: files, resuming after a kill, and what goes wrong."""

from __future__ import annotations

import dataclasses
import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import specdec
from specdec.errors import ConfigError, TrainingError, UnsupportedError
from specdec.hf.checkpoints import load_head
from specdec.hf.initial_head import HeadShape
from specdec.hf.tiny import tiny_model
from specdec.train import files
from specdec.train.command import parse_taps, tiny_config, train
from specdec.train.optimise import OptimiserConfig
from specdec.train.pipeline import Place, TrainingRun
from specdec.train.progress import Silent
from specdec.train.state import FILE, read_state

CPU = Place(torch.device("cpu"))


def run_in(folder: Path, **changes) -> TrainingRun:
    """A run of one round of text and six steps."""
    model, tokenizer = tiny_model()
    config = dataclasses.replace(tiny_config(), **{"tokens": 3000, "epochs": 2, **changes})
    return TrainingRun(model, tokenizer, folder, config, Silent(), CPU)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("head")
    model, tokenizer = tiny_model()
    train(model, tokenizer, "tiny", out, tiny_config(), Silent(), CPU)
    return out


def test_leaves_a_head_that_drafts_a_card_and_figures(finished: Path):
    model, _ = tiny_model()
    head = load_head(finished)
    assert head.config.tie_lm_head and head.token_order is not None
    prompt = torch.randint(256, (1, 6))
    found = specdec.generate(model, prompt, drafter=f"eagle:{finished}", max_new_tokens=20, do_sample=False)
    assert torch.equal(found, model.generate(prompt, max_new_tokens=20, do_sample=False))
    figures = json.loads((finished / "training.json").read_text())
    assert figures["history"][-1]["step"] == 21 and "tau" in figures["history"][-1]
    assert set(figures["held_out"]) >= {"chain 1", "chain 8", "tree 8", "tree 60"}
    losses = [entry["loss"][0] for entry in figures["history"]]
    assert losses[-1] < losses[0]
    assert "Held-out acceptance" in (finished / "README.md").read_text()


def test_same_command_again_changes_nothing(finished: Path):
    before = (finished / "model.safetensors").read_bytes()
    model, tokenizer = tiny_model()
    train(model, tokenizer, "tiny", finished, tiny_config(), Silent(), CPU)
    assert (finished / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_killed_at_any_point_it_resumes_to_the_same_curve_and_head(finished: Path, tmp_path: Path):
    script = (
        "import torch, dataclasses; from pathlib import Path; from tests.unit.test_train_command import *\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        "model, tokenizer = tiny_model()\n"
        f"config = dataclasses.replace(tiny_config(), save_seconds=0)\n"
        f"train(model, tokenizer, 'tiny', Path({str(tmp_path)!r}), config, Silent(), CPU)\n"
    )
    kills = 0
    work = tmp_path / "work"
    milestones = [
        lambda: any((work / "text").glob("round-*")),
        lambda: (work / FILE).exists(),
        lambda: (state := read_state(work)) is not None and state.step >= 8,
    ]
    for milestone in milestones:
        process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script])
        while process.poll() is None and not milestone():
            time.sleep(0.02)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    model, tokenizer = tiny_model()
    config = dataclasses.replace(tiny_config(), save_seconds=0)
    train(model, tokenizer, "tiny", tmp_path, config, Silent(), CPU)
    assert kills >= 2
    one, other = (json.loads((folder / "training.json").read_text()) for folder in (finished, tmp_path))
    assert one["history"] == other["history"]
    assert (finished / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_other_settings_do_not_go_on_from_a_run(finished: Path):
    other = run_in(finished / "work", tokens=6144, epochs=3, optimiser=OptimiserConfig(learning_rate=1e-4))
    with pytest.raises(ConfigError, match=r"optimiser=.*1e-04|optimiser=.*0\.0001"):
        other.train()


def test_a_nan_loss_is_said_and_the_state_from_before_is_kept(tmp_path: Path):
    run = run_in(tmp_path, optimiser=OptimiserConfig(learning_rate=1e30, clip=1e30))
    run.write_text()
    with pytest.raises(TrainingError, match=r"the loss is .* at step \d+.*lower the learning rate"):
        run.train()
    state = read_state(tmp_path)
    assert state is not None and state.step == 0


def test_a_full_disk_is_said_and_nothing_half_written_stays(tmp_path: Path, monkeypatch):
    run = run_in(tmp_path)
    run.write_text()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("specdec.train.state.save_file", full)
    with pytest.raises(TrainingError, match=r"disk of .* is full.*run the same command again"):
        run.train()
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_failure_while_writing_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file"
    files.put_whole(path, lambda beside: beside.write_text("old"))
    with pytest.raises(ValueError, match="no"):

        def fail(beside: Path) -> None:
            beside.write_text("half")
            raise ValueError("no")

        files.put_whole(path, fail)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_too_small_a_vocabulary_is_said(tmp_path: Path):
    run = run_in(tmp_path, shape=HeadShape(draft_vocab_size=20))
    run.write_text()
    with pytest.raises(TrainingError, match=r"draft vocabulary of 20 tokens covers \d+%.*--draft-vocab"):
        run.train()


def test_a_reduced_vocabulary_trains_its_own_lm_head(tmp_path: Path):
    run = run_in(tmp_path, shape=HeadShape(draft_vocab_size=250))
    run.write_text()
    head, state, corpus = run.train()
    assert head.lm_head is not None and head.lm_head.weight.shape[0] == 250
    counts = corpus.frequencies(257)
    assert counts[head.target_ids].min() >= counts[~head.t2d].max()
    losses = [entry["loss"][0] for entry in state.history]
    assert losses[-1] < losses[0]


def test_prompts_are_answered(tmp_path: Path):
    run = run_in(tmp_path)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    run.write_text(prompts)
    rows = run.train()[2]
    starts = {tuple(row[:3]) for row in rows.tokens.tolist()}
    assert starts == {(1, 2, 3), (4, 5, 6)}


def test_minutes_cut_text_and_steps(tmp_path: Path):
    run = run_in(tmp_path, tokens=10**9, epochs=1e6, minutes=0.04)
    run.write_text()
    _, state, corpus = run.train()
    assert corpus.num_tokens < 10**7 and 1 <= state.total_steps < 10**5


def test_a_model_without_template_needs_prompts(tmp_path: Path):
    run = run_in(tmp_path)
    run.tokenizer.chat_template = None
    with pytest.raises(UnsupportedError, match="no chat template"):
        run.write_text()
    run.write_text([[1, 2, 3]])
    assert run.train()[1].step == 6


def test_taps_are_read_from_text():
    assert parse_taps("2, 15,27") == (2, 15, 27)
    with pytest.raises(ConfigError, match="taps='2;3'"):
        parse_taps("2;3")


@pytest.mark.slow
def test_two_processes_train_together(tmp_path: Path):
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "specdec"]
    options = ["train", "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-W", "ignore", "-m", *command, *options], check=True, timeout=300)
    history = json.loads((tmp_path / "training.json").read_text())["history"]
    assert history[-1]["step"] == 9  # 21 for one process
    assert history[-1]["loss"][0] < history[0]["loss"][0]
    assert len(list((tmp_path / "work" / "text").glob("round-*"))) == 2
