"""What a figure depends on: versions, machine, commit, date."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "triton")


def provenance(device: torch.device) -> dict[str, Any]:
    """Everything about this process and machine that figures depend on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit_of(Path(__file__).resolve()),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}},
        "machine": machine(device),
    }


def version_of(package: str) -> str | None:
    """The installed version, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit_of(file: Path) -> str | None:
    """The commit that `file` belongs to, with `+` behind it where files were changed; None outside of a repository."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file.parent, "rev-parse", "HEAD")
    changed = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, threads, load, and the GPU where one is used."""
    found: dict[str, Any] = {
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if hasattr(os, "getloadavg"):  # not on Windows
        found["load_average"] = round(os.getloadavg()[0], 2)
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
    return found


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system tells it."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
