"""`AdaptiveVerifier` ends up with the fastest of equal verifiers, for each shape."""

import pytest

from specdec.verify.adaptive import CALLS_BETWEEN_TRIALS, TRIALS, AdaptiveVerifier
from specdec.verify.base import Verifier
from specdec.verify.eager import EagerVerifier
from tests.windows import Case, random_case


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Verifier):
    """The eager verdict, for a price that depends on the shape."""

    def __init__(self, clock: Clock, price) -> None:
        self.calls = 0
        self.price = price
        self._clock = clock

    def verify(self, logits, window, sampler):
        self.calls += 1
        self._clock.now += self.price(window.width, self.calls)
        return EagerVerifier().verify(logits, window, sampler)


def run(verifier: AdaptiveVerifier, case: Case, times: int) -> None:
    for _ in range(times):
        verifier.verify(case.logits, case.window, case.make_sampler())


@pytest.fixture
def small() -> Case:
    return random_case(1, 1, 0)


@pytest.fixture
def large() -> Case:
    return random_case(2, 1, 12, chain=True)


def test_the_fastest_is_chosen_for_each_shape(small, large):
    clock = Clock()
    constant, linear = Slow(clock, lambda width, _: 3.0), Slow(clock, lambda width, _: width * 1.0)
    verifier = AdaptiveVerifier({"constant": constant, "linear": linear}, clock)
    assert large.window.width > 4 and verifier.chosen(1, 1) is None
    run(verifier, small, 2 * TRIALS + 10)
    run(verifier, large, 2 * TRIALS + 10)
    assert verifier.chosen(1, 1) == "linear" and verifier.chosen(1, large.window.width) == "constant"
    assert constant.calls == linear.calls == 2 * TRIALS + 10


def test_a_slow_first_call_does_not_count(small):
    clock = Clock()
    captures = Slow(clock, lambda _, calls: 100.0 if calls == 1 else 1.0)
    verifier = AdaptiveVerifier({"steady": Slow(clock, lambda *_: 2.0), "captures": captures}, clock)
    run(verifier, small, 2 * TRIALS)
    assert verifier.chosen(1, 1) == "captures"


def test_the_choice_is_looked_at_again_after_many_calls(small):
    clock = Clock()
    one, two = Slow(clock, lambda *_: 1.0), Slow(clock, lambda *_: 2.0)
    verifier = AdaptiveVerifier({"one": one, "two": two}, clock)
    run(verifier, small, CALLS_BETWEEN_TRIALS)
    assert verifier.chosen(1, 1) == "one"
    one.price = lambda *_: 9.0
    run(verifier, small, 2 * TRIALS)
    assert verifier.chosen(1, 1) == "two"


@pytest.mark.parametrize("seed", range(4))
def test_verdicts_are_the_eager_ones_while_trying_and_after(seed):
    verifier = AdaptiveVerifier()
    case = random_case(seed, 3, 9, agreement=0.9, sampled=bool(seed % 2))
    expected = case.run(EagerVerifier())
    for _ in range(3 * TRIALS + 2):
        assert case.run(verifier) == expected
    assert verifier.chosen(3, case.window.width) is not None
