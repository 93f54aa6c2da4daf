"""`specdec plot`: figures from the report of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specdec.errors import ConfigError, choose
from specdec.plot import FIGURES, draw, read


def plot_command(
    report: Annotated[Path, typer.Argument(help="report.json, as specdec bench --output writes it.")],
    output: Annotated[Path | None, typer.Option(help="Folder for the figures.  Default: the report's own.")] = None,
    figure: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(FIGURES)}; may be given several times.  Default: all.")
    ] = None,
    file_format: Annotated[str, typer.Option("--format", help="svg, png or pdf.")] = "svg",
) -> None:
    """Draw throughput, speed-up, τ and acceptance of a benchmark."""
    choose("--format", file_format, dict.fromkeys(("svg", "png", "pdf")))
    data = read(report.expanduser())
    folder = output.expanduser() if output is not None else report.expanduser().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ConfigError(f"--output {folder} cannot be made: {failure}; accepted: a folder") from failure
    for name in figure or list(FIGURES):
        path = folder / f"{name}.{file_format}"
        draw(name, data).savefig(path, dpi=150)
        Console(stderr=True, soft_wrap=True).print(f"wrote {path}", highlight=False, markup=False)
