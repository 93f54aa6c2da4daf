"""`DeviceDrafter`: the drafter's part of a captured step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from specdec.config import require_int
from specdec.errors import ConfigError
from specdec.kernels.acceptance import Walk
from specdec.kernels.step_state import StepBuffers
from specdec.types import MAX_WINDOW, Verdict, Window


class DeviceDrafter(ABC):
    """Proposes tokens inside a captured step.

    Life: `begin` → `observe_prefill`* → `bind` → (`propose` → `observe`)* → `end`.  `propose` and `observe` are
    recorded once and replayed: they read and write tensors at fixed addresses only, never look at the host's
    state, and never synchronise.  Rows that are done (limit 0) may be drafted for; nothing of it is kept.
    """

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """Target features that are needed, as in `Drafter.taps`."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Window nodes of every step, the root included."""

    @property
    @abstractmethod
    def is_chain(self) -> bool:
        """Whether every draft is a chain."""

    @property
    def most_kept(self) -> int:
        """Most nodes that a step can keep: the depth of the deepest node, and one."""
        return self.width

    @abstractmethod
    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        """Get ready for a batch: one unpadded prompt per row; no row grows beyond `max_length` tokens."""

    @abstractmethod
    def observe_prefill(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        """Learn a prefill window, kept whole; runs outside of any capture."""

    @abstractmethod
    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        """Rows `copies` have the prompt of `source`, whose prefill was just observed: take its state over."""

    @abstractmethod
    def bind(self, rows: int, device: torch.device) -> None:
        """Put the state of the batch where steps of `rows` rows find it (rows behind the batch are done)."""

    @abstractmethod
    def propose(self, buffers: StepBuffers) -> None:
        """Fill in drafted tokens, parents and numbers of nodes; roots, lengths and counts are up to date."""

    @abstractmethod
    def observe(self, buffers: StepBuffers, features: tuple[Float[Tensor, "b w d"], ...], walk: Walk) -> None:
        """Learn what became of the window; lengths and roots are still those of before the step."""

    @abstractmethod
    def end(self) -> None:
        """Let go of what was held for the batch; what captured steps refer to stays."""


@final
class NoDeviceDrafts(DeviceDrafter):
    """Plain decoding: windows of the root alone."""

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def width(self) -> int:
        return 1

    @property
    def is_chain(self) -> bool:
        return True

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        pass

    def observe_prefill(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        pass

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        pass

    def bind(self, rows: int, device: torch.device) -> None:
        pass

    def propose(self, buffers: StepBuffers) -> None:
        pass

    def observe(self, buffers: StepBuffers, features: tuple[Float[Tensor, "b w d"], ...], walk: Walk) -> None:
        pass

    def end(self) -> None:
        pass


@final
class SyntheticDrafts(DeviceDrafter):
    """A known continuation with errors put in at fixed places: measures the system at a chosen acceptance.

    Node `d` of the chain bears the true token of generated index `t + d - 1` unless that index is spoiled.
    """

    def __init__(
        self, continuations: Int[Tensor, "b t"], spoiled: Int[Tensor, "b t"], width: int, vocab_size: int
    ) -> None:
        """Args:
        continuations: what plain decoding emits, row by row.
        spoiled: 1 at indices whose draft is to be wrong.
        """
        require_int("width", width, 1, MAX_WINDOW)
        if continuations.shape != spoiled.shape:
            raise ConfigError(f"spoiled of shape {tuple(spoiled.shape)}; accepted: {tuple(continuations.shape)}")
        self._width = width
        drafts = torch.where(spoiled.bool(), (continuations + 1) % vocab_size, continuations)
        self._drafts = F.pad(drafts, (0, width))
        self._steps = torch.arange(width - 1, device=drafts.device)
        self._padded: dict[int, Tensor] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def width(self) -> int:
        return self._width

    @property
    def is_chain(self) -> bool:
        return True

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        if len(prompts) > len(self._drafts):
            raise ConfigError(f"{len(prompts)} prompts; accepted: at most {len(self._drafts)}, one per continuation")

    def observe_prefill(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        pass

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        pass

    def bind(self, rows: int, device: torch.device) -> None:
        if rows not in self._padded:
            self._padded[rows] = F.pad(self._drafts[:rows], (0, 0, 0, rows - len(self._drafts[:rows])))

    def propose(self, buffers: StepBuffers) -> None:
        drafts = self._padded[len(buffers.tokens)]
        index = (buffers.counts[:, None] + self._steps).clamp(max=drafts.shape[1] - 1)
        buffers.tokens[:, 1:] = drafts.gather(1, index)
        buffers.num_nodes.fill_(self._width)

    def observe(self, buffers: StepBuffers, features: tuple[Float[Tensor, "b w d"], ...], walk: Walk) -> None:
        pass

    def end(self) -> None:
        pass
