"""Training state on disk: a killed run goes on from it to the same loss curve."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.errors import ConfigError
from specdec.train.files import put_whole
from specdec.train.optimise import HeadOptimiser

FILE = "state.safetensors"


@dataclass
class RunState:
    """Where a run stands; the tensors lie beside it in the same file."""

    fingerprint: dict[str, Any]
    """What the run was started with: another run must not go on from it."""
    total_steps: int
    step: int = 0
    seconds: float = 0.0
    """Time spent on training steps so far."""
    history: list[dict[str, Any]] = field(default_factory=list)


def save_state(folder: Path, state: RunState, optimiser: HeadOptimiser) -> None:
    """Write state, masters and optimiser moments as one file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in optimiser.masters.named_parameters():
        tensors[f"head.{name}"] = parameter.detach().cpu()
        for moment, value in optimiser.adamw.state.get(parameter, {}).items():
            tensors[f"adamw.{moment}.{name}"] = value.detach().cpu()
    if optimiser.masters.config.reduced:
        tensors["target_ids"] = optimiser.masters.target_ids.cpu()
    plain = {"fingerprint": state.fingerprint, "total_steps": state.total_steps, "step": state.step}
    metadata = {"state": json.dumps(plain | {"seconds": state.seconds, "history": state.history})}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    put_whole(folder / FILE, lambda path: save_file(contiguous, path, metadata=metadata))


def read_state(folder: Path) -> RunState | None:
    """The state of an earlier run in this folder, without its tensors."""
    if not (folder / FILE).exists():
        return None
    with safe_open(folder / FILE, "pt") as file:
        return RunState(**json.loads(file.metadata()["state"]))


def restore(folder: Path, state: RunState, fingerprint: dict[str, Any], optimiser: HeadOptimiser) -> None:
    """Put masters and moments back.  Raises `ConfigError` naming what differs if the run was started otherwise."""
    for name in sorted(state.fingerprint.keys() | fingerprint.keys()):
        before, now = state.fingerprint.get(name), fingerprint.get(name)
        if before != now:
            raise ConfigError(
                f"{name}={now!r}, but {folder} holds a run with {name}={before!r}; accepted: the same settings, or "
                "another --out"
            )
    with safe_open(folder / FILE, "pt") as file:
        names = set(file.keys())
        for name, parameter in optimiser.masters.named_parameters():
            with torch.no_grad():
                parameter.copy_(file.get_tensor(f"head.{name}"))
            moments = {}
            for moment in ("step", "exp_avg", "exp_avg_sq"):
                if f"adamw.{moment}.{name}" in names:
                    value = file.get_tensor(f"adamw.{moment}.{name}")
                    stays = moment == "step" and not optimiser.adamw.defaults["fused"]
                    moments[moment] = value if stays else value.to(parameter.device)
            if moments:
                optimiser.adamw.state[parameter] = moments
        if "target_ids" in names:
            optimiser.masters.set_vocabulary(file.get_tensor("target_ids").to(optimiser.masters.target_ids.device))
            optimiser.working.set_vocabulary(optimiser.masters.target_ids)
    optimiser.refresh()
