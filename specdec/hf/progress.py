"""Progress on standard error while a model is prepared and loaded."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers.utils import logging as transformers_logging


@final
class LoadingProgress:
    """Shows on standard error what `load_model` reports; on anything but a terminal, one line for each slow stage."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        # transformers draws a bar over GGUF conversion that no setting switches off.
        self._silence = redirect_stderr(io.StringIO())
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )
        self._task: TaskID | None = None
        self._what = ""

    def __enter__(self) -> LoadingProgress:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self._progress.start()
        self._silence.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._silence.__exit__(None, None, None)
        self._progress.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(what, total=total or None, amount="")
            self._what = what
            if not self._console.is_terminal and what != "Loading the model":
                self._console.print(f"{what} ...", highlight=False)
        assert self._task is not None
        amount = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
        self._progress.update(self._task, completed=done, total=total or None, amount=amount)
