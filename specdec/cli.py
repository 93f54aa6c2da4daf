"""The command `specdec`, and the only place that reads the environment.

Each sub-command is a function in a module of its own, whose signature is its options; `COMMANDS` names them all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.exceptions import TyperException

from specdec.bench.command import bench_command
from specdec.bench.eval import eval_command
from specdec.bench.microbench_command import microbench_command, ncu_report_command
from specdec.cli_generate import generate
from specdec.cli_info import info
from specdec.cli_plot import plot_command
from specdec.cli_trace import trace_command
from specdec.errors import SpecdecError, choose
from specdec.policies import WRITERS
from specdec.train.command import train_command

COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate,
    "info": info,
    "trace": trace_command,
    "bench": bench_command,
    "plot": plot_command,
    "train": train_command,
    "eval": eval_command,
    "microbench": microbench_command,
    "ncu-report": ncu_report_command,
}

FAILED = 2
"""Exit status of a command that failed; 1 is for a comparison that found a difference."""


def main() -> None:
    """The entry point."""
    sys.exit(run(sys.argv[1:], os.environ))


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one command line and return its exit status; an error is one line, with `--debug` its traceback."""
    debug, arguments = take_debug(arguments)
    try:
        defaults = {name: defaults_from(environment) for name in COMMANDS}
        app = typer.main.get_command(build_app())
        status = app.main(arguments, prog_name="specdec", standalone_mode=False, default_map=defaults)
    except Exception as failure:
        if debug:
            raise
        Console(stderr=True, soft_wrap=True).print(
            f"[red]specdec:[/] {escape(one_line(failure, arguments))}", highlight=False
        )
        return FAILED
    return status if isinstance(status, int) else 0


def build_app() -> typer.Typer:
    """All sub-commands under one roof."""
    app = typer.Typer(no_args_is_help=True, add_completion=False)

    @app.callback()
    def specdec(
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    ) -> None:
        """Lossless speculative decoding for Hugging Face causal language models."""

    for name, command in COMMANDS.items():
        app.command(name)(command)
    return app


def take_debug(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Take `--debug` out of the options, wherever it stands before a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(options) < end, [*options, *arguments[end:]]


def defaults_from(environment: Mapping[str, str]) -> dict[str, Any]:
    """Defaults of options that the environment sets.  Raises `ConfigError`, naming the variable, for unknown values."""
    defaults: dict[str, Any] = {}
    if "SPECDEC_KV_WRITER" in environment:
        choose("SPECDEC_KV_WRITER", environment["SPECDEC_KV_WRITER"], dict(WRITERS))
        defaults["writer"] = environment["SPECDEC_KV_WRITER"]
    if environment.get("SPECDEC_CACHE"):
        defaults["cache_dir"] = environment["SPECDEC_CACHE"]
    elif environment.get("XDG_CACHE_HOME"):
        defaults["cache_dir"] = os.path.join(environment["XDG_CACHE_HOME"], "specdec")
    return defaults


def one_line(failure: Exception, arguments: Sequence[str]) -> str:
    """What went wrong and what to do about it."""
    message = " ".join(str(failure).split())
    if isinstance(failure, SpecdecError):
        return message
    if isinstance(failure, TyperException):
        command = arguments[0] + " " if arguments and arguments[0] in COMMANDS else ""
        return f"{failure.format_message().rstrip('.')}; see specdec {command}--help"
    return f"unexpected {type(failure).__name__}: {message or 'no message'}; run again with --debug for the traceback"
