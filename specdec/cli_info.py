"""`specdec info`: what a model is, whether it is supported, and what its cache costs."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specdec.hf.describe import ModelDescription, describe_model
from specdec.hf.models import DEFAULT_CACHE, DEFAULT_MODEL
from specdec.hf.progress import LoadingProgress

VERDICTS = {True: "yes", False: "no", None: "not known before it is loaded"}


def info(
    model: Annotated[str, typer.Argument(help="Hub id, model folder or .gguf file.")] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: as the checkpoint says.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every byte of the stored default model; make it anew if broken.")
    ] = False,
    cache_dir: Annotated[Path, typer.Option(help="Where the default model is kept (SPECDEC_CACHE).")] = DEFAULT_CACHE,
) -> None:
    """Say what a model is, whether and how it is supported, and what its cache costs.  Its weights are not loaded."""
    with LoadingProgress() as progress:
        description = describe_model(model, dtype, cache_dir, progress, verify)
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(description), ensure_ascii=False) + "\n")
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows(description):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def rows(model: ModelDescription) -> list[tuple[str, str]]:
    """The description as lines of a table."""
    lines = [
        ("model", model.name),
        ("architecture", model.architecture),
        ("supported", VERDICTS[model.supported] + (f": {model.why_not}" if model.why_not else "")),
    ]
    if model.num_parameters is not None:
        lines.append(("parameters", f"{model.num_parameters / 1e6:,.1f} million, {model.dtype}"))
    lines += [
        ("shape", f"{model.num_layers} layers, hidden size {model.hidden_size}, vocabulary {model.vocab_size}"),
        ("longest text", "no stated limit" if model.max_length is None else f"{model.max_length} tokens"),
        ("positions", f"rope, {', '.join(model.rope_types)}" if model.rope_types else "no rope"),
        ("chat template", "yes" if model.chat_template else "no"),
    ]
    lines += [("attention", group) for group in model.attention]
    if model.cache_bytes_per_token is not None:
        lines.append(("cache", f"{model.cache_bytes_per_token:,} bytes a token ({model.dtype})"))
    return lines + [("note", note) for note in model.notes]
