"""A folder that is either whole or not there, whatever happens to the processes that make it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

MANIFEST = "manifest.json"


def is_whole(folder: Path, check_hashes: bool = False) -> bool:
    """Whether every file of the folder's manifest is there with its size (with `check_hashes`: and its SHA-256)."""
    try:
        listed = json.loads((folder / MANIFEST).read_text())["files"]
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, KeyError):
        return False
    for name, expected in listed.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            return False
        if check_hashes and sha256(file) != expected["sha256"]:
            return False
    return True


def make_whole(
    folder: Path,
    fill: Callable[[Path, Path], dict],
    check_hashes: bool = False,
    on_wait: Callable[[], None] = lambda: None,
) -> Path:
    """Return `folder`, made by `fill(result, scratch)` unless it is there and whole; one process at a time.

    `fill` writes the files into `result`, may litter `scratch`, and returns facts for the manifest.  Both lie in a
    hidden folder next to `folder`, and only the finished `result` is renamed to it: a process that dies on the way
    leaves litter, which the next one removes, and never a folder that looks whole.  A damaged folder is made anew.
    `on_wait` is called before waiting for another process.
    """
    if is_whole(folder, check_hashes):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder, on_wait):
        if is_whole(folder, check_hashes):  # another process made it while this one waited
            return folder
        for litter in folder.parent.glob(f".{folder.name}.partial-*"):
            shutil.rmtree(litter, ignore_errors=True)  # an orphaned download may still be writing there
        workplace = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        try:
            result, scratch = workplace / "result", workplace / "scratch"
            result.mkdir()
            scratch.mkdir()
            facts = fill(result, scratch)
            _write_manifest(result, facts)
            if folder.exists():
                os.replace(folder, workplace / "damaged")
            os.replace(result, folder)
        finally:
            shutil.rmtree(workplace, ignore_errors=True)
    return folder


def sha256(file: Path) -> str:
    """SHA-256 of a file's bytes (hexadecimal)."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_manifest(folder: Path, facts: dict) -> None:
    """List size and SHA-256 of every file, once their bytes are on the disk."""
    files = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        _sync(file)
        files[file.relative_to(folder).as_posix()] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    (folder / MANIFEST).write_text(json.dumps({**facts, "files": files}, indent=2) + "\n")
    _sync(folder / MANIFEST)


def _sync(file: Path) -> None:
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


@contextmanager
def _locked(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the file lock beside the folder; the system lets go of it when this process dies."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
