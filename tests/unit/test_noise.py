"""Graph-safe variates: distribution by Kolmogorov and Smirnov, extremes, seeds."""

import math

import pytest
import torch

from specdec.verify.noise import RESOLUTION, GraphSafeRandom

LAWS = {
    "uniform": lambda x: x,
    "exponential": lambda x: 1 - torch.exp(-x),
    "gumbel": lambda x: torch.exp(-torch.exp(-x)),
}


def distance(sample: torch.Tensor, law) -> float:
    """Largest distance between empirical and true distribution, times √n."""
    ordered = sample.double().sort().values
    steps = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    expected = law(ordered)
    gap = torch.maximum((steps - expected).abs(), (expected - steps + 1 / len(ordered)).abs()).max()
    return float(gap) * math.sqrt(len(ordered))


@pytest.mark.parametrize("name", LAWS)
def test_distribution(name):
    sample = getattr(GraphSafeRandom(1, "cpu"), name)((100_000,))
    assert sample.isfinite().all()
    assert distance(sample, LAWS[name]) < 1.95, "the 0.1% point of the Kolmogorov distribution"


def test_the_test_of_distribution_notices_a_wrong_law():
    sample = GraphSafeRandom(1, "cpu").uniform((100_000,))
    assert distance(sample**1.02, LAWS["uniform"]) > 1.95


@pytest.mark.parametrize("name", LAWS)
def test_seeds(name):
    def draw(seed):
        source = GraphSafeRandom(seed, "cpu")
        return getattr(source, name)((50,)), getattr(source, name)((50,))

    (one, two), (again, _), (other, _) = draw(3), draw(3), draw(4)
    assert torch.equal(one, again) and not torch.equal(one, two) and not torch.equal(one, other)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    GraphSafeRandom(0, "cpu").gumbel((10,))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("name", LAWS)
def test_extreme_draws_stay_finite(name, draw, monkeypatch):
    """`torch.rand` may give 0 and 1 - 2⁻²⁴."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([draw]))
    source = GraphSafeRandom(0, "cpu")
    value = float(getattr(source, name)((1,)))
    assert math.isfinite(value)
    assert 0 < float(source.uniform((1,))) < 1
    assert float(source.exponential((1,))) >= 0.5 / RESOLUTION
