"""Files that are whole or not there, whatever kills the process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from specdec.errors import TrainingError


def put_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then move it into place.  Raises `TrainingError` on a full disk."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    except Exception as failure:
        beside.unlink(missing_ok=True)
        if _is_full(failure):
            raise TrainingError(
                f"the disk of {path.parent} is full while writing {path.name}; what was saved before is intact: make "
                "room and run the same command again to go on from there"
            ) from failure
        raise


def _is_full(failure: Exception) -> bool:
    """Whether a failure is a full disk; the safetensors writer says so in its message only."""
    if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(failure) or "os error 28" in str(failure)
