"""How tree attention is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Tiling:
    """How the work is cut; none of it depends on context lengths."""

    block_m: int
    """Packed query rows (node · group + member) of a program."""
    block_n: int
    """Keys taken at once."""
    splits: int
    """Programs that share a prefix; one less than a power of two, since the window is one more."""
    num_warps: int
    num_stages: int

    @staticmethod
    def choose(pairs: int, packed_rows: int, small: bool, num_programs: int) -> Tiling:
        """Enough splits that `num_programs` programs run for `pairs` (row, KV head) pairs; 31 at most.

        `small` blocks are for rows that would not fit the registers: large heads, and fp32, which has no matrix unit.
        """
        block_m = min(16 if small else 64, max(16, triton.next_power_of_2(packed_rows)))
        tiles = pairs * triton.cdiv(packed_rows, block_m)
        splits = 1
        while splits < 31 and tiles * splits < num_programs:
            splits = 2 * splits + 1
        return Tiling(block_m, 32 if small else 64, splits, num_warps=4, num_stages=2)


def programs_wanted(device: torch.device) -> int:
    """Programs that keep a device busy: one per multiprocessor (more splits cost more to merge than they save)."""
    return 4 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count
