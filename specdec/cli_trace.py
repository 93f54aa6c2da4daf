"""`specdec trace`: one prompt, answered, and a page that shows how every token of the answer came about."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from specdec.cli_generate import encode, pad_token, read_prompt, sampling_arguments
from specdec.errors import ConfigError
from specdec.hf.drafters import NAMES, make_drafter
from specdec.hf.models import DEFAULT_CACHE, DEFAULT_MODEL, load_model
from specdec.hf.progress import LoadingProgress
from specdec.policies import VERIFIERS, WRITERS
from specdec.trace.collect import trace
from specdec.trace.html import write


def trace_command(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the page to this file.  Default: trace.html, unless --json is given.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything the page shows as one JSON object.")
    ] = False,
    model: Annotated[str, typer.Option(help="Hub id, model folder or .gguf file.")] = DEFAULT_MODEL,
    drafter: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(NAMES)}.  Default: the head that ships for the default model, else suffix.",
            show_default=False,
        ),
    ] = None,
    writer: Annotated[str, typer.Option(help=f"{', '.join(WRITERS)} (SPECDEC_KV_WRITER).")] = "deferred",
    verifier: Annotated[str, typer.Option(help=f"{', '.join(VERIFIERS)}.")] = "eager",
    max_new_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=0, help="Default: what the model's generation config says.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Default: as for --top-k.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 0,
    candidates: Annotated[int, typer.Option(min=1, max=50, help="Likeliest tokens to show for each place.")] = 5,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: as the checkpoint says.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda:0, ...; auto: the first GPU where there is one.")] = "auto",
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.  Default: where the model has one.")
    ] = None,
    cache_dir: Annotated[Path, typer.Option(help="Where the default model is kept (SPECDEC_CACHE).")] = DEFAULT_CACHE,
) -> None:
    """Answer a prompt, and write a page that shows how each token of the answer came about."""
    text = read_prompt(prompt, prompt_file)
    sampling = sampling_arguments(temperature, top_k, top_p)
    page = html if html is not None or as_json else Path("trace.html")
    if page is not None and not page.expanduser().parent.is_dir():
        raise ConfigError(f"--html {page}: there is no such folder; accepted: a file in a folder that exists")
    with LoadingProgress() as progress:
        target, tokenizer = load_model(model, dtype, device, cache_dir, on_progress=progress)
    name = drafter or ("eagle" if model == DEFAULT_MODEL else "suffix")
    torch.manual_seed(seed)
    report = trace(
        target,
        tokenizer,
        encode(tokenizer, text, chat)["input_ids"],
        top=candidates,
        drafter=make_drafter(name, target, tokenizer),
        writer=writer,
        verifier=verifier,
        facts={
            "model": model,
            "drafter": name,
            "sampling": "greedy" if temperature == 0.0 else f"temperature {temperature:g}, seed {seed}",
        },
        max_new_tokens=max_new_tokens,
        pad_token_id=pad_token(target),
        **sampling,
    )
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), ensure_ascii=False) + "\n")
    if page is not None:
        write(report, page.expanduser())
        Console(stderr=True, soft_wrap=True).print(f"wrote {page}", highlight=False, markup=False)
