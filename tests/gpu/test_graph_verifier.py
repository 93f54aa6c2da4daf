"""`GraphVerifier` over real CUDA graphs: the contract of the CPU tests, where recording is real."""

import pytest
import torch

from specdec.types import Draft, Window
from specdec.verify.capture import CudaGraphBackend
from specdec.verify.eager import EagerVerifier
from specdec.verify.graph import GraphVerifier
from tests.windows import Case, random_case, stops_at, temperature

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

VARIANTS = {
    "greedy": {},
    "sampled": {"sampled": True, "history": 3},
    "processed": {"sampled": True, "processors": [temperature(0.6)], "scores_only": True},
    "stops": {"criteria": [stops_at(3, 5)]},
    "lockstep": {"lockstep": True},
}


def on_cuda(case: Case) -> Case:
    """The same case with window and logits on the GPU; prompts and noise stay where they are."""
    window = case.window
    draft = Draft(window.tokens[:, 1:].cuda(), window.parents[:, 1:].cuda(), window.num_nodes.cuda() - 1)
    moved = Window.over(window.tokens[:, 0].cuda(), draft, window.rows, window.context_lengths)
    return Case(moved, case.logits.cuda(), case.make_sampler)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chain", [True, False])
def test_equal_noise_gives_the_eager_verdict(variant, chain):
    verifier = GraphVerifier()
    for seed in range(24):
        case = random_case(
            seed, 1 + seed % 5, (0, 3, 7, 15, 63)[seed % 5], chain=chain, agreement=0.9, **VARIANTS[variant]
        )
        expected = case.run(EagerVerifier())
        for _ in range(2):
            assert on_cuda(case).run(verifier) == expected
    counters = verifier.counters
    assert counters.replays >= 24 and counters.captures >= 5
    assert not counters.failures and not counters.uncaptured


def test_the_first_result_is_right_without_a_replay():
    case = on_cuda(random_case(3, 4, 15, agreement=0.95))
    verifier = GraphVerifier()
    assert case.run(verifier) == case.run(EagerVerifier())
    assert (verifier.counters.captures, verifier.counters.replays) == (1, 0)


def test_a_capture_that_fails_falls_back_and_leaves_the_stream_usable():
    """A host read inside a capture is forbidden; the backend must come out of it clean."""
    backend = CudaGraphBackend()
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError):
        backend.capture(lambda: x * float(x.sum()))
    recording = backend.capture(lambda: x * 2)
    assert recording.first_result.tolist() == [2, 2, 2]
    x.fill_(4)
    assert recording.replay().tolist() == [8, 8, 8]


def test_nothing_is_captured_inside_another_capture():
    backend = CudaGraphBackend()
    device = torch.device("cuda", torch.cuda.current_device())
    assert backend.unavailable(device) is None
    graph, x = torch.cuda.CUDAGraph(), torch.ones(3, device="cuda")
    with torch.cuda.graph(graph):
        reason = backend.unavailable(device)
        x + 1
    assert reason == "the current stream is being captured already"


def test_the_capture_cache_bounds_its_memory():
    verifier = GraphVerifier(capacity=2)
    for i in range(12):
        case = on_cuda(random_case(i, 1 << (i % 4), 15, agreement=0.9))
        case.run(verifier)
    assert verifier.counters.evictions >= 9
