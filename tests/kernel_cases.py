"""Random windows over random pages, shared by the kernel tests on CPU (Triton's interpreter) and on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.types import Window, depths_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_parents(rows: int, width: int, generator: torch.Generator, chain: bool = False) -> Tensor:
    """`[rows width]`: each node hangs on an earlier one."""
    if chain:
        return (torch.arange(width) - 1).clamp(min=0).repeat(rows, 1)
    draws = torch.rand(rows, width, generator=generator)
    parents = (draws * torch.arange(width)).long()
    return parents


def random_window(
    lengths: list[int],
    width: int,
    seed: int = 0,
    chain: bool = False,
    num_nodes: list[int] | None = None,
    vocab: int = 50,
) -> Window:
    """A window of random trees on `DEVICE` in which siblings bear distinct tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    parents = random_parents(rows, width, generator, chain)
    tokens = torch.stack([torch.randperm(vocab, generator=generator)[:width] for _ in range(rows)])
    counts = torch.tensor(num_nodes or [width] * rows)
    return Window(
        rows=tuple(range(rows)),
        tokens=tokens.to(DEVICE),
        parents=parents.to(DEVICE),
        depths=depths_of(parents).to(DEVICE),
        num_nodes=counts.to(DEVICE),
        context_lengths=tuple(lengths),
        is_chain=chain,
    )


def random_pages(
    lengths: list[int],
    page_size: int,
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    seed: int = 0,
    layers: int = 1,
    room: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages `[layers num_pages page_size *row_shape]`, shuffled; their table and lengths; free slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(length + room) // page_size) for length in lengths]
    num_pages = sum(needed) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.zeros(len(lengths), max(1, *needed), dtype=torch.int32)
    pages = torch.full((layers, num_pages, page_size, *row_shape), float("nan"))
    for row, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        own = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(own, dtype=torch.int32)
        slots = [own[t // page_size] * page_size + t % page_size for t in range(length)]
        pages.flatten(1, 2)[:, slots] = torch.randn(layers, length, *row_shape, generator=generator)
    return pages.to(DEVICE, dtype), table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64; NaN where anything is NaN."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))
