"""`specdec generate`: one prompt, answered as it comes, and one line that says how fast."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

import specdec
from specdec.cli_terminal import TextOutput
from specdec.errors import ConfigError
from specdec.hf.drafters import NAMES, make_drafter
from specdec.hf.models import DEFAULT_CACHE, DEFAULT_MODEL, load_model
from specdec.hf.progress import LoadingProgress
from specdec.policies import VERIFIERS, WRITERS
from specdec.stats import SpecStats
from specdec.types import StepRecord

DIFFERENT = 1
"""Exit status of `--compare` where the tokens differ and must not."""


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
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
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=0, help="Default: what the model's generation config says.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Default: as for --top-k.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text.  Default: a new one.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: as the checkpoint says.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda:0, ...; auto: the first GPU where there is one.")] = "auto",
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.  Default: where the model has one.")
    ] = None,
    show_acceptance: Annotated[
        bool, typer.Option("--show-acceptance", help="Colour accepted, bonus and plain tokens.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, token ids, the record of every step.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Run model.generate() too: speeds, ratio, same tokens?  Exit status 1 if not, in fp32."
        ),
    ] = False,
    cache_dir: Annotated[Path, typer.Option(help="Where the default model is kept (SPECDEC_CACHE).")] = DEFAULT_CACHE,
) -> None:
    """Answer a prompt with speculative decoding."""
    text = read_prompt(prompt, prompt_file)
    sampling = sampling_arguments(temperature, top_k, top_p)
    with LoadingProgress() as progress:
        target, tokenizer = load_model(model, dtype, device, cache_dir, on_progress=progress)
        inputs = encode(tokenizer, text, chat).to(target.device)
        drafter = drafter or ("eagle" if model == DEFAULT_MODEL else "suffix")
        job = Job(
            target,
            inputs,
            seed=torch.seed() % 2**31 if seed is None else seed,
            arguments={"max_new_tokens": max_new_tokens, "pad_token_id": pad_token(target), **sampling},
            speculation={"drafter": make_drafter(drafter, target, tokenizer), "writer": writer, "verifier": verifier},
        )
        if compare:
            progress("Warming up", 0, 0)
            job.warm_up()
    output = None if as_json else TextOutput(tokenizer, show_acceptance)
    ours = job.run_ours(output)
    if output is not None:
        output.end()
        seed_note = f" · seed {job.seed}" if sampling["do_sample"] else ""
        say(ours.stats.summary(ours.seconds, drafter) + seed_note)
    theirs = job.run_theirs() if compare else None
    if output is not None and theirs is not None:
        say(comparison_line(job, ours, theirs))
    if as_json:
        settings = dict(
            model=model,
            drafter=drafter,
            writer=writer,
            verifier=verifier,
            dtype=str(target.dtype).removeprefix("torch."),
        )
        sys.stdout.write(json.dumps(report(job, ours, theirs, tokenizer, settings), ensure_ascii=False) + "\n")
    if theirs is not None and theirs.tokens != ours.tokens and target.dtype == torch.float32:
        raise typer.Exit(DIFFERENT)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from where it was given.  Raises `ConfigError` unless there is exactly one, and it is not empty."""
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("give one prompt: as an argument, with --prompt-file FILE, or - for standard input")
    if prompt_file is None:
        text = sys.stdin.read() if prompt == "-" else str(prompt)
    else:
        try:
            text = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as failure:
            raise ConfigError(
                f"--prompt-file {prompt_file} cannot be read: {failure}; accepted: a UTF-8 text file"
            ) from failure
    if not text.strip():
        raise ConfigError("the prompt is empty; accepted: at least one character that is not white space")
    return text


def sampling_arguments(temperature: float, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """The arguments of `model.generate` that say how to pick tokens.  Raises `ConfigError` for settings in vain."""
    if temperature == 0.0:
        for name, value in (("--top-k", top_k), ("--top-p", top_p)):
            if value is not None:
                raise ConfigError(f"{name} {value} has no effect on greedy decoding; give --temperature above 0 too")
        return {"do_sample": False}
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return {"do_sample": True, **{name: value for name, value in given.items() if value is not None}}


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None) -> BatchEncoding:
    """Token ids of the prompt, as the user's turn of a chat or as it stands."""
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        return tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    if tokenizer.chat_template is None:
        raise ConfigError("--chat: this model's tokenizer has no chat template; use --no-chat")
    messages = [{"role": "user", "content": text}]
    laid_out = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return cast(BatchEncoding, laid_out)


def pad_token(model: PreTrainedModel) -> int:
    """Any token will do to pad a batch of one; stating it keeps transformers from warning."""
    pad = model.generation_config.pad_token_id
    return 0 if pad is None else pad


@dataclass(frozen=True)
class Result:
    """What one way of decoding gave."""

    tokens: list[int]
    seconds: float
    records: list[StepRecord]

    @property
    def stats(self) -> SpecStats:
        return SpecStats.of(self.records)

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


@dataclass(frozen=True)
class Job:
    """One prompt, to be answered by specdec and by plain transformers in the same way."""

    model: PreTrainedModel
    inputs: BatchEncoding
    seed: int
    arguments: dict[str, Any]
    speculation: dict[str, Any]

    def run_ours(self, on_step: Callable[[StepRecord], None] | None, **changes: Any) -> Result:
        """Decode speculatively; `on_step` is called as each step is done."""
        records: list[StepRecord] = []

        def keep(record: StepRecord) -> None:
            records.append(record)
            if on_step is not None:
                on_step(record)

        arguments = {**self.arguments, **self.speculation, **changes}
        return self._timed(lambda: specdec.generate(self.model, **self.inputs, **arguments, on_step=keep), records)

    def run_theirs(self, **changes: Any) -> Result:
        """Decode with `model.generate`."""
        arguments = {**self.arguments, **changes}
        return self._timed(lambda: cast(Any, self.model).generate(**self.inputs, **arguments), [])

    def warm_up(self) -> None:
        """Let both ways allocate what they allocate once."""
        self.run_ours(None, max_new_tokens=4)
        self.run_theirs(max_new_tokens=4)

    def _timed(self, decode: Callable[[], Any], records: list[StepRecord]) -> Result:
        torch.manual_seed(self.seed)
        start = time.perf_counter()
        sequences: Tensor = decode()
        seconds = time.perf_counter() - start
        return Result(sequences[0, self.inputs["input_ids"].shape[1] :].tolist(), seconds, records)

    @torch.no_grad()
    def top_2_gap(self, tokens: list[int]) -> float:
        """Difference of the two largest logits behind the prompt and `tokens`."""
        ids = torch.cat(
            [self.inputs["input_ids"], torch.tensor([tokens], dtype=torch.long, device=self.model.device)], dim=1
        )
        first, second = self.model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2).values.tolist()
        return first - second


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first token that differs or is missing; None where there is none."""
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def comparison_line(job: Job, ours: Result, theirs: Result) -> str:
    """Both speeds, their ratio, and whether the tokens are the same."""
    ratio = ours.tokens_per_second / theirs.tokens_per_second
    dtype = str(job.model.dtype).removeprefix("torch.")
    difference = first_difference(ours.tokens, theirs.tokens)
    same = "tokens identical"
    if difference is not None:
        gap = job.top_2_gap(ours.tokens[:difference])
        same = f"tokens DIFFER from token {difference} on (top-2 gap of the logits there: {gap:.3g})"
    return (
        f"{len(theirs.tokens)} tokens · {theirs.tokens_per_second:.1f} tokens/s by model.generate() · "
        f"specdec is {ratio:.2f}× as fast · {same} ({dtype})"
    )


def report(
    job: Job, ours: Result, theirs: Result | None, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> dict[str, Any]:
    """Everything about a generation as plain values."""
    result = {
        **settings,
        "device": str(job.model.device),
        "seed": job.seed,
        "prompt_ids": job.inputs["input_ids"][0].tolist(),
        "token_ids": ours.tokens,
        "text": tokenizer.decode(ours.tokens, skip_special_tokens=True),
        "seconds": ours.seconds,
        "tokens_per_second": ours.tokens_per_second,
        "stats": ours.stats.to_dict(),
        "steps": [dataclasses.asdict(record) for record in ours.records],
    }
    if theirs is not None:
        result["compare"] = {
            "token_ids": theirs.tokens,
            "seconds": theirs.seconds,
            "tokens_per_second": theirs.tokens_per_second,
            "speedup": ours.tokens_per_second / theirs.tokens_per_second,
            "identical": ours.tokens == theirs.tokens,
            "first_difference": first_difference(ours.tokens, theirs.tokens),
        }
    return result


def say(line: str) -> None:
    """Print one line of figures."""
    Console(soft_wrap=True, highlight=False).print(line, style="dim", markup=False)
