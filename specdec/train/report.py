"""What a finished training leaves behind besides the weights: figures, their plot, and a model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.draft.eagle_head import EagleHead
from specdec.train.acceptance import Tau
from specdec.train.files import put_whole
from specdec.train.pipeline import TrainConfig

FIGURES, PLOT, CARD = "training.json", "training.png", "README.md"


def write_figures(
    folder: Path, config: TrainConfig, history: Sequence[dict[str, Any]], taus: dict[str, Tau], facts: dict[str, Any]
) -> None:
    """Everything that was measured, as JSON."""
    figures = {
        "facts": facts,
        "config": asdict(config),
        "held_out": {name: tau_entry(tau) for name, tau in taus.items()},
        "history": list(history),
    }
    put_whole(folder / FIGURES, lambda path: path.write_text(json.dumps(figures, indent=1, default=str) + "\n"))


def tau_entry(tau: Tau) -> dict[str, Any]:
    """One measured setting."""
    return {
        "tau": round(tau.tau, 4),
        "mean_of_texts": round(tau.mean_of_texts, 4),
        "by_position": [round(rate, 4) for rate in tau.by_position],
        "steps": tau.steps,
        "texts": tau.texts,
    }


def plot_history(path: Path, history: Sequence[dict[str, Any]], title: str) -> None:
    """Loss and agreement of each unrolled step, and held-out τ, against training tokens.  Needs matplotlib."""
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for_loss, for_agreement, for_tau = figure.subplots(1, 3)
    tokens = [entry["tokens"] / 1e6 for entry in history]
    for step in range(len(history[0]["loss"]) if history else 0):
        for_loss.plot(tokens, [entry["loss"][step] for entry in history], label=f"step {step}")
        for_agreement.plot(tokens, [entry["agreement"][step] for entry in history], label=f"step {step}")
    looks = [entry for entry in history if "tau" in entry]
    for_tau.plot([entry["tokens"] / 1e6 for entry in looks], [entry["tau"] for entry in looks], marker="o")
    names = ("soft cross-entropy", "agreement with the target's argmax", "held-out τ, chain of 5")
    for axes, name in zip((for_loss, for_agreement, for_tau), names, strict=True):
        axes.set(xlabel="training tokens (millions, epochs counted)", title=name)
        axes.grid(alpha=0.3)
    for_loss.legend(fontsize="small")
    figure.suptitle(title)
    put_whole(path, lambda beside: figure.savefig(beside, dpi=120, format="png"))


def model_card(
    name: str,
    head: EagleHead,
    config: TrainConfig,
    history: Sequence[dict[str, Any]],
    taus: dict[str, Tau],
    facts: dict[str, Any],
) -> str:
    """The model card, in Markdown."""
    shape, last = head.config, history[-1]
    rows = "\n".join(
        f"| {setting} | {tau.tau:.2f} | {' '.join(f'{rate:.2f}' for rate in tau.by_position)} |"
        for setting, tau in taus.items()
    )
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return f"""# EAGLE-3 head for {name}

A draft head for lossless speculative decoding of {name}: one decoder layer of {parameters / 1e6:.1f}M parameters.
It reads the target's residual stream entering layers {", ".join(map(str, shape.taps))}, and drafts
{shape.num_draft_tokens} tokens{" with the target's own lm_head" if shape.tie_lm_head else ""}.

## Use

    specdec generate "..." --model {name} --drafter eagle:FOLDER

or `specdec.generate(model, input_ids, drafter="eagle:FOLDER")`; what comes out is what the target alone would say.

## Training

{facts.get("source", "The target wrote the training text itself")}: {facts["text_tokens"] / 1e6:.1f}M tokens.
Training-time test of {config.recipe.steps} steps, {last["step"]} optimiser steps over
{last["tokens"] / 1e6:.1f}M tokens, epochs counted; AdamW at {config.optimiser.learning_rate:g} with a cosine to zero;
soft cross-entropy against the target's logits sharpened by {config.recipe.sharpness:g}.

## Held-out acceptance

Greedy, along {taus[next(iter(taus))].texts if taus else 0} replies that were kept apart; τ counts the bonus token.

| drafts | τ | acceptance by position, given the ones before |
| --- | --- | --- |
{rows}
"""
