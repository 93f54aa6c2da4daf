"""One whole step on the device.  `StepProgram.run` is what graphs record, and its own readable eager twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.graphs.drafts import DeviceDrafter
from specdec.graphs.stage import DeviceStage
from specdec.kernels.acceptance import NoiseRing, PickTiles, empty_walk, pick_tiles, walk
from specdec.kernels.step_state import StepBuffers, open_window, settle_step
from specdec.kv.pages import PagedKVCache
from specdec.sampling import Processor
from specdec.target import Target
from specdec.types import Window


@dataclass(frozen=True)
class Law:
    """How tokens are picked: processors that look at scores alone, then the argmax, against noise when sampling."""

    processors: tuple[Processor, ...] = ()
    variates: Float[Tensor, "capacity b v"] | None = None
    """Noise of the generated indices in use, at `index % capacity`; None picks greedily."""
    stop_tokens: Int[Tensor, " s"] | None = None
    """Tokens that end a row."""


class StepProgram:
    """propose → open → forward (stages, attends) → pick → walk → observe → commit → settle, over static buffers.

    Nothing in `run` reads the device on the host, so the host may run ahead of it, and a graph may record it.
    """

    def __init__(
        self,
        target: Target,
        drafter: DeviceDrafter,
        cache: PagedKVCache,
        buffers: StepBuffers,
        page_table: Tensor,
        law: Law,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.buffers = buffers
        self.law = law
        self.stage = DeviceStage(cache, buffers, page_table)
        rows, width = buffers.tokens.shape
        self._walk = empty_walk(rows, width, buffers.tokens.device)
        self._no_ids = torch.zeros(rows * width, 0, dtype=torch.long, device=buffers.tokens.device)
        no_stops = torch.zeros(0, dtype=torch.long, device=buffers.tokens.device)
        self._stops = no_stops if law.stop_tokens is None else law.stop_tokens
        self._window = static_window(buffers, drafter.is_chain)

    @torch.no_grad()
    def run(self) -> None:
        """Advance every row that is not done; mutates buffers, pages and the drafter's state."""
        buffers = self.buffers
        self.drafter.propose(buffers)
        open_window(buffers)
        output = self.target.forward(self._window, self.stage, self.drafter.taps)
        assert output.logits is not None
        found = walk(
            self._pick(output.logits),
            buffers.tokens,
            buffers.parents,
            buffers.ancestor_bits,
            buffers.num_nodes,
            buffers.limits,
            self._stops,
            out=self._walk,
        )
        self.drafter.observe(buffers, output.features, found)
        self.stage.commit(found)
        settle_step(buffers, found.path, found.num_kept, found.next_tokens, found.stopped)

    def _pick(self, logits: Float[Tensor, "b w v"]) -> PickTiles:
        if self.law.processors:
            scores = logits.flatten(0, 1).float()
            for processor in self.law.processors:
                scores = processor(self._no_ids, scores)
            logits = scores.unflatten(0, logits.shape[:2])
        if self.law.variates is None:
            return pick_tiles(logits)
        noise = NoiseRing(self.law.variates, self.buffers.counts)
        return pick_tiles(logits.float().softmax(-1), noise, self.buffers.depths)


def static_window(buffers: StepBuffers, is_chain: bool) -> Window:
    """The buffers as a `Window`, whose host-side lengths mean nothing: a captured step must not depend on them."""
    rows = len(buffers.tokens)
    window = Window(
        rows=tuple(range(rows)),
        tokens=buffers.tokens,
        parents=buffers.parents,
        depths=buffers.depths,
        num_nodes=buffers.num_nodes,
        context_lengths=(0,) * rows,
        is_chain=is_chain,
    )
    # A window derives these once, on the host's order; here they are buffers that every step fills anew.
    vars(window).update(lengths=buffers.lengths, positions=buffers.positions, ancestor_bits=buffers.ancestor_bits)
    return window


def law_key(processors: Sequence[Processor]) -> tuple[object, ...]:
    """What tells processors apart that are pure functions of the scores: their class and their settings."""
    return tuple((type(p).__qualname__, tuple(sorted((k, repr(v)) for k, v in vars(p).items()))) for p in processors)
