"""Training on a GPU: merged flash attention with shared key heads, lock-step decoding, and captured steps."""

from __future__ import annotations

import copy

import torch

from specdec.hf.initial_head import HeadShape, initial_head
from specdec.hf.lockstep import LockstepModel
from specdec.hf.teacher import TeacherModel
from specdec.train.chains import chain_attention, chain_attention_reference
from specdec.train.eagle import Batch, TestTimeTraining
from specdec.train.optimise import HeadOptimiser, OptimiserConfig
from tests.kernel_cases import relative_error
from tests.models import tiny_llama


def small_model():
    """Heads of 16, which the kernels need."""
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=4)
    return tiny_llama(**sizes, tie_word_embeddings=True, initializer_range=0.1).cuda()


def test_merged_flash_attention_with_shared_key_heads():
    torch.manual_seed(0)
    shapes = [(2, 9, 45, 64), *[(2, 3, 45, 64)] * 6]
    half = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in half]
    found = chain_attention(*half[:3], 0.125, *half[3:])
    wanted = chain_attention_reference(*exact[:3], 0.125, *exact[3:])
    upstream = torch.randn_like(found)
    assert relative_error(found, wanted.detach()) < 1e-2
    gradients = torch.autograd.grad(found, half, upstream), torch.autograd.grad(wanted, exact, upstream.double())
    for one, other in zip(*gradients, strict=True):
        assert relative_error(one, other) < 1e-2


def test_captured_lockstep_decoding_gives_the_models_logits():
    model = small_model()
    tokens = torch.randint(101, (5, 20), device="cuda")
    lockstep = LockstepModel(model, 5, 32)
    with torch.no_grad():
        whole = model(tokens).logits
    for column in range(20):
        assert relative_error(lockstep.step(tokens[:, column], column), whole[:, column]) < 2e-3


def test_captured_steps_equal_eager_ones():
    model = small_model()
    optimisers = []
    for _ in range(2):
        head = initial_head(model, HeadShape())
        teacher = TeacherModel(model, head.config.taps, 16)
        optimisers.append(HeadOptimiser(head, teacher, TestTimeTraining(steps=3), OptimiserConfig(), torch.float32))
    optimisers[1]._use_graph = False
    for seed in range(4):
        torch.manual_seed(seed)
        tokens = torch.randint(101, (4, 16), device="cuda")
        batch = Batch(tokens, torch.randperm(64, device="cuda")[:40], torch.ones(40, device="cuda"))
        captured, eager = (optimiser.step(copy.copy(batch), 0.3) for optimiser in optimisers)
        assert relative_error(captured, eager) < 1e-3
    one, other = (torch.cat([p.detach().flatten() for p in o.masters.parameters()]) for o in optimisers)
    assert relative_error(one, other) < 1e-3
