"""Budget controllers against simulated drafters and costs, and the adaptive drafter in the real loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest

from specdec.draft.adaptive import AdaptiveDrafter
from specdec.draft.budget import (
    BudgetController,
    CostModelConfig,
    CostModelController,
    CostTable,
    EwmaConfig,
    EwmaController,
    Outcome,
    RankAcceptance,
)
from specdec.errors import ConfigError
from tests.models import VOCAB, tiny_llama
from tests.systems import DRAFTERS, GREEDY, SAMPLED, plain, prompts, speculative

Acceptance = Callable[[int, int], float]
"""`(step, depth) → probability that a draft is right`."""

COSTS: dict[str, Callable[[int], float]] = {
    "window nearly free": lambda nodes: 1 + 0.005 * nodes,
    "usual": lambda nodes: 1 + 0.05 * nodes,
    "dear drafts": lambda nodes: 1 + 0.3 * nodes,
    "a fixed price for any draft": lambda nodes: 1.25 + 0.005 * nodes if nodes else 1.0,
}
LARGEST = CostModelConfig().budgets[-1]


@dataclass
class Step:
    budget: int
    emitted: float
    seconds: float


def simulate(
    controller: BudgetController,
    right: Acceptance,
    cost: Callable[[int], float],
    steps: int,
    rows: int = 1,
    seed: int = 0,
) -> list[Step]:
    """Chains whose tokens are right by chance; costs jitter by up to 5%, and one step in 50 takes ten times as long."""
    random, log = Random(seed), []
    for step in range(steps):
        budget = controller.choose(rows)
        accepted = []
        for _ in range(rows):
            depth = 0
            while depth < budget and random.random() < right(step, depth + 1):
                depth += 1
            accepted.append(list(range(1, depth + 1)))
        seconds = cost(budget) * (1 + 0.05 * random.random())
        hiccup = 10 if random.random() < 0.02 else 1
        controller.learn(Outcome([budget] * rows, accepted, seconds * hiccup))
        log.append(Step(budget, 1 + sum(map(len, accepted)) / rows, seconds))
    return log


def rate(log: list[Step]) -> float:
    return sum(step.emitted for step in log) / sum(step.seconds for step in log)


def wrong(step: int, depth: int) -> float:
    return 0.0


def perfect(step: int, depth: int) -> float:
    return 1.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cost", COSTS)
def test_a_drafter_that_is_always_wrong_costs_at_most_three_percent(cost, seed):
    late = simulate(CostModelController(), wrong, COSTS[cost], 600, seed=seed)[64:]
    plain_rate = 1 / (COSTS[cost](0) * 1.025)
    assert rate(late) > 0.97 * plain_rate
    assert any(step.budget > 0 for step in late), "without a probe nobody would notice that it got better"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cost", COSTS)
def test_a_perfect_drafter_reaches_the_maximum(cost, seed):
    log = simulate(CostModelController(), perfect, COSTS[cost], 64, seed=seed)
    assert [step.budget for step in log[32:]].count(LARGEST) >= 30


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cost", COSTS)
def test_a_workload_that_changes_half_way_is_followed_within_32_steps(cost, seed):
    def gets_better(step, depth):
        return float(step >= 200)

    def gets_worse(step, depth):
        return float(step < 200)

    log = simulate(CostModelController(), gets_better, COSTS[cost], 300, seed=seed)
    assert [step.budget for step in log[232:280]].count(LARGEST) >= 46
    log = simulate(CostModelController(), gets_worse, COSTS[cost], 300, seed=seed)
    assert [step.budget for step in log[232:280]].count(0) >= 40
    assert max(step.budget for step in log[232:280]) <= 3


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_it_comes_close_to_the_best_fixed_budget(share, rows):
    cost = COSTS["usual"]
    log = simulate(CostModelController(), lambda step, depth: share, cost, 600, rows)[64:]
    rates = [(1 + sum(share**d for d in range(1, n + 1))) / cost(n) / 1.025 for n in CostModelConfig().budgets]
    assert rate(log) > 0.88 * max(rates)


def test_it_does_not_flap():
    """Neighbouring budgets are all but equal here; what is left of changes are probes and slow drift."""
    log = simulate(CostModelController(), lambda step, depth: 0.7, COSTS["usual"], 600, rows=8)[64:]
    changes = sum(before.budget != after.budget for before, after in pairwise(log))
    assert changes < 0.12 * len(log)


def test_batch_sizes_have_costs_of_their_own():
    """A wide batch makes windows dear; when rows end, drafts pay again, without starting to learn anew."""
    controller = CostModelController()
    simulate(controller, lambda *_: 0.6, lambda nodes: 1 + 0.8 * nodes, 100, rows=32)
    assert controller.budget == 0
    log = simulate(controller, lambda *_: 0.6, lambda nodes: 1 + 0.02 * nodes, 150, rows=2)
    assert max(step.budget for step in log[:4]) <= 2, "costs are inherited until there are own ones"
    assert sum(step.budget > 2 for step in log[60:]) > 45


def test_costs_between_and_beyond_measured_budgets_lie_on_lines():
    table = CostTable()
    for budget, seconds in ((0, 1.0), (4, 3.0), (0, 9.0), (8, 4.0)):
        table.add(budget, seconds)
    assert table.costs((0, 2, 4, 6, 8, 16)) == [1.0, 2.0, 3.0, 3.5, 4.0, 6.0]
    falling = CostTable()
    falling.add(4, 2.0)
    falling.add(8, 1.0)
    assert falling.costs((0, 6, 16)) == [2.0, 1.5, 1.0], "beyond what was measured, none counts as cheaper"


def test_acceptance_by_rank():
    acceptance = RankAcceptance(memory=1.0)
    for accepted in ([], [1], [1, 2], [1, 2]):
        acceptance.learn(Outcome([2], [accepted], 1.0))
    assert list(acceptance.probabilities()[:2]) == [0.75, 0.5]
    assert acceptance.expected_tokens(0) == 1.0 and acceptance.expected_tokens(2) == 2.25
    assert acceptance.probabilities()[2] == pytest.approx(0.5 * 0.5 / 0.75)
    assert acceptance.expected_tokens(63) < 3.6, "ranks without evidence go on falling"


def test_rows_that_draft_less_say_nothing_about_deeper_ranks():
    acceptance = RankAcceptance(memory=1.0)
    acceptance.learn(Outcome([3, 1], [[1, 2, 3], []], 1.0))
    assert acceptance.probabilities()[0] == 0.5 and acceptance.probabilities()[2] == 1.0


def test_the_moving_average_stays_within_its_bounds_and_never_moves_its_base():
    controller = EwmaController(EwmaConfig(base=4, low=1, high=8))
    log = simulate(controller, lambda step, depth: float(step // 500 % 2 == 0), COSTS["usual"], 5000)
    assert {step.budget for step in log} <= set(range(1, 9))
    assert controller.config == EwmaConfig(base=4, low=1, high=8)
    assert log[499].budget == 8 and log[999].budget == 1 and log[4499].budget == 8 and log[4999].budget == 1


def test_the_moving_average_follows_acceptance():
    controller = EwmaController(EwmaConfig(base=4, low=0, high=16, smoothing=0.5))
    assert controller.choose(1) == 4
    controller.learn(Outcome([4], [[1, 2, 3, 4]], 1.0))
    assert controller.average == 0.75 and controller.choose(1) == 6
    controller.learn(Outcome([0], [[]], 1.0))
    assert controller.average == 0.75, "a step without drafts says nothing"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CostModelConfig(budgets=(1, 2)), "budgets=\\(1, 2\\); accepted: at least two, ascending from 0"),
        (lambda: CostModelConfig(budgets=(0, 2, 2)), "ascending"),
        (lambda: CostModelConfig(budgets=(0, 64)), "budgets=64; accepted: an integer from 1 to 63"),
        (lambda: CostModelConfig(memory=1.0), "memory=1.0"),
        (lambda: CostModelConfig.of(hysterese=0.1), "hysterese=0.1: unknown option"),
        (lambda: EwmaConfig(base=20), "base=20; accepted: an integer from 1 to 16"),
        (lambda: EwmaConfig.of(speed=1), "speed=1: unknown option"),
    ],
)
def test_configurations_refuse_what_they_do_not_know(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# -- in the loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("controller", [CostModelController, EwmaController])
def test_the_text_is_that_of_plain_decoding_while_budgets_change(controller, num_rows, mode):
    model, inputs = tiny_llama(), prompts(num_rows, VOCAB)
    options = {**mode, "max_new_tokens": 50}
    expected = plain(model, inputs, **options).tolist()
    truth = [row[inputs["input_ids"].shape[1] :] for row in expected]
    records = []
    drafter = AdaptiveDrafter(DRAFTERS["mixed-tree"](truth, VOCAB), controller())
    assert speculative(model, inputs, drafter, on_step=records.append, **options).tolist() == expected
    assert len({record.notes["budget"] for record in records}) > 1
    for record in records:
        assert max(map(len, record.draft_tokens)) <= int(record.notes["budget"])
    assert sum(record.num_accepted for record in records) > 0


def test_what_was_learnt_goes_on_into_the_next_generation():
    model, inputs = tiny_llama(), prompts(1, VOCAB)
    truth = plain(model, inputs, max_new_tokens=40)[:, 9:].tolist()
    drafter, runs = AdaptiveDrafter(DRAFTERS["wrong"](truth, VOCAB)), []
    for _ in range(2):
        records = []
        speculative(model, inputs, drafter, on_step=records.append, max_new_tokens=40)
        runs.append([int(record.notes["budget"]) for record in records])
    assert max(runs[0]) == LARGEST and max(runs[1]) < 8


@pytest.mark.slow
def test_real_steps_of_a_wrong_drafter_are_steps_of_plain_decoding():
    """The ratio of real step times: medians of interleaved runs, the best of each, since a busy machine only adds."""
    model, inputs = tiny_llama(num_hidden_layers=4), prompts(1, VOCAB)
    truth = plain(model, inputs, max_new_tokens=200)[:, 9:].tolist()
    times: dict[str, list[float]] = {"plain": [], "wrong": []}
    for _ in range(5):
        for name, drafter in (
            ("plain", DRAFTERS["none"](truth, VOCAB)),
            ("wrong", AdaptiveDrafter(DRAFTERS["wrong"](truth, VOCAB))),
        ):
            records = []
            speculative(model, inputs, drafter, on_step=records.append, max_new_tokens=200)
            times[name].append(statistics.median(sum(record.timings_ms.values()) for record in records[64:]))
    assert min(times["wrong"]) < 1.1 * min(times["plain"])
