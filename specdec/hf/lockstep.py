"""`LockstepModel`: many rows of one model, all at the same position, decoding together from contiguous K/V.

Self-generated training text needs throughput, not latency: thousands of rows fill a GPU, and rows that never part ways
need no page table.  Everything else in the library uses the paged cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from specdec.errors import ConfigError, UnsupportedError
from specdec.hf.target import HFTarget, unique_configs
from specdec.hf.teacher import check_plain_attention

NAME = "specdec_lockstep"


@dataclass
class _Lockstep:
    """What the attention layers see of a step."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    position: Int[Tensor, " 1"]
    num_keys: Int[Tensor, ""]
    host_position: int | None
    """None inside a CUDA graph, where the position is read on the device."""


@final
class LockstepModel:
    """Decodes `rows` sequences at one common position; row `i` of every step continues row `i` of the step before.

    On CUDA the forward is captured once as a graph that serves every position.  Raises `UnsupportedError` as
    `check_plain_attention` does.
    """

    def __init__(self, model: PreTrainedModel, rows: int, capacity: int) -> None:
        check_plain_attention(model, capacity)
        target = HFTarget(model)
        AttentionInterface.register(NAME, _attend)
        self._model, self._configs, self.rows, self.capacity = model, unique_configs(model), rows, capacity
        device = target.device
        self._step = _Lockstep({}, {}, _zero(device, 1), _zero(device, dtype=torch.int32), None)
        for layer_idx, number in target.profile.layer_numbers.items():
            shape = target.layers[number]
            like = torch.empty(0, dtype=shape.dtype, device=shape.device)
            self._step.keys[layer_idx] = like.new_zeros(rows, shape.num_kv_heads, capacity, shape.k_size)
            self._step.values[layer_idx] = like.new_zeros(rows, shape.num_kv_heads, capacity, shape.v_size)
        self._tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._logits: Tensor | None = None
        self._graph = self._capture() if device.type == "cuda" else None

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, " b"], position: int) -> Float[Tensor, "b v"]:
        """Logits after the tokens at `position` (all earlier positions decoded before); valid until the next step."""
        if not 0 <= position < self.capacity:
            raise ConfigError(f"position={position}; accepted: 0 to {self.capacity - 1}")
        self._tokens.copy_(tokens[:, None])
        self._step.position.fill_(position)
        self._step.num_keys.fill_(position + 1)
        if self._graph is None:
            self._step.host_position = position
            return self._forward()
        self._graph.replay()
        assert self._logits is not None
        return self._logits

    def _forward(self) -> Float[Tensor, "b v"]:
        with _attention_named(self._configs):
            positions = self._step.position.expand(self.rows, 1)
            output = self._model(
                input_ids=self._tokens, position_ids=positions, use_cache=False, specdec_lockstep=self._step
            )
        return output.logits[:, -1]

    @torch.no_grad()
    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        self._step.num_keys.fill_(1)
        with torch.cuda.stream(side):
            self._forward()  # compiles the kernels, which must not happen inside a capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._forward()
        return graph


def _zero(device: torch.device, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _attend(
    module: nn.Module,
    query: Float[Tensor, "b heads 1 d"],
    key: Float[Tensor, "b h 1 d"],
    value: Float[Tensor, "b h 1 d"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    specdec_lockstep: _Lockstep | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "b 1 heads d"], None]:
    """Write the step's K/V at its position and attend to everything up to it."""
    if specdec_lockstep is None:
        raise UnsupportedError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    step, layer = specdec_lockstep, int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = step.keys[layer], step.values[layer]
    keys.index_copy_(2, step.position, key)
    values.index_copy_(2, step.position, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if step.host_position is None:
        from specdec.kernels.lockstep_attention import attend_lockstep  # triton exists only beside CUDA

        return attend_lockstep(query[:, :, 0], keys, values, step.num_keys, scale)[:, None], None
    seen = step.host_position + 1
    out = F.scaled_dot_product_attention(query, keys[:, :, :seen], values[:, :, :seen], scale=scale, enable_gqa=True)
    return out.transpose(1, 2), None


@contextmanager
def _attention_named(configs: tuple) -> Iterator[None]:
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
