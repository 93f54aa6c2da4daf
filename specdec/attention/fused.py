"""The contract of `reference.attend` as a Triton kernel over the pages: what a GPU uses and CUDA graphs capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from specdec.attention.reference import AttentionRules
from specdec.errors import UnsupportedError
from specdec.types import KVView, Window

if TYPE_CHECKING:
    from specdec.kernels.tiling import Tiling


def attend_fused(
    query: Float[Tensor, "b heads w dk"],
    view: KVView,
    window: Window,
    rules: AttentionRules,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Float[Tensor, "b w heads dv"]:
    """Attention of the window's nodes over committed tokens and their own ancestors; reads nothing on the host.

    Raises `UnsupportedError` for pages with one scale per layer.
    """
    if view.k_scales is not None and view.k_scales.dim() == 1:
        raise UnsupportedError("attention='fused' over pages with one scale per layer; accepted there: 'paged'")
    # Triton comes with the CUDA builds of torch only, so nothing may import it before it is needed.
    from specdec.kernels.tree_attention import tree_attention

    device = query.device
    return tree_attention(
        query,
        view.k_pages,
        view.v_pages,
        view.k,
        view.v,
        view.prefix.page_table.to(device),
        view.prefix.lengths.to(device),
        window.positions.to(device),
        None if window.is_chain else window.ancestor_bits.to(device),
        rules.scaling,
        rules.sliding_window,
        rules.softcap,
        rules.sinks,
        view.k_scales,
        view.v_scales,
        tiling,
        pdl,
    )
