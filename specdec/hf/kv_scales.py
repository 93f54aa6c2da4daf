"""K/V scales that quantised checkpoints bring along, for `SpecConfig(kv_dtype=..., kv_scales=...)`."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import safe_open

from specdec.errors import CheckpointError

PATTERN = re.compile(r"\.layers\.(\d+)\.self_attn\.(?:([kv])_scale|([kv])_proj\.(?:[kv]_scale|output_scale))$")


def read_kv_scales(folder: str | Path) -> tuple[tuple[float, float], ...]:
    """One K and V scale per layer, in the order of the layers, from a folder of safetensors files.

    Known are `self_attn.k_scale`, `self_attn.k_proj.k_scale` and `self_attn.k_proj.output_scale`, and the same for v.
    Raises `CheckpointError` where there are none, where a layer lacks one, and where one is no positive number.
    """
    folder = Path(folder).expanduser()
    found: dict[tuple[int, str], float] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                match = PATTERN.search(name)
                if match is None:
                    continue
                value = tensors.get_tensor(name)
                if value.numel() != 1 or not 0 < float(value) < float("inf"):
                    raise CheckpointError(f"{file}: {name} is {value.tolist()}; expected one positive number")
                found[int(match[1]), match[2] or match[3]] = float(value)
    if not found:
        raise CheckpointError(f"{folder} has no K/V scales; expected tensors such as model.layers.0.self_attn.k_scale")
    layers = range(1 + max(layer for layer, _ in found))
    missing = [f"{kind}_scale of layer {layer}" for layer in layers for kind in "kv" if (layer, kind) not in found]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {missing[0]}; expected a K and a V scale for each of {len(layers)} layers"
        )
    return tuple((found[layer, "k"], found[layer, "v"]) for layer in layers)
