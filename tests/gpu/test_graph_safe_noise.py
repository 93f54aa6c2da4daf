"""Graph-safe variates under replay: fresh numbers each time, the same for the same seed, the right law."""

import pytest
import torch

from specdec.verify.noise import GraphSafeRandom
from tests.unit.test_noise import LAWS, distance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def replays(name: str, seed: int, count: int) -> list[torch.Tensor]:
    source = GraphSafeRandom(seed, "cuda")
    graph = torch.cuda.CUDAGraph()
    source.register(graph)
    getattr(source, name)((8,))  # warm-up
    with torch.cuda.graph(graph):
        sample = getattr(source, name)((100_000,))
    drawn = []
    for _ in range(count):
        graph.replay()
        drawn.append(sample.clone())
    return drawn


@pytest.mark.parametrize("name", LAWS)
def test_replays(name):
    drawn = replays(name, 5, 4)
    for i, sample in enumerate(drawn):
        assert sample.isfinite().all()
        assert distance(sample.cpu(), LAWS[name]) < 1.95
        assert all(not torch.equal(sample, other) for other in drawn[:i]), "each replay draws anew"
    assert all(torch.equal(a, b) for a, b in zip(drawn, replays(name, 5, 4), strict=True))
    assert not torch.equal(drawn[0], replays(name, 6, 1)[0])
