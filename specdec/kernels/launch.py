"""Programmatic dependent launch (PDL): kernels that start before the one in front of them has ended.

A kernel's programs call `let_next_start` first and `wait_for_inputs` before they touch anything that any earlier kernel
wrote or still reads.  Since every program waits, an ended kernel means that all kernels in front of it have ended too.
What may be read before the wait is what no kernel of a step writes: weights.  (CUDA C++ Programming Guide, section on
programmatic dependent launch; Hopper and later.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel's programs start as soon as there is room; they wait for this kernel's end by themselves."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until everything that earlier kernels wrote is there.  Every program must come by here."""
    if PDL:
        gdc_wait()


def launch_options(pdl: bool) -> dict[str, bool]:
    """What a launch is told."""
    return {"PDL": pdl, "launch_pdl": True} if pdl else {"PDL": False}
