"""The head's wiring, against a second way of writing it down."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from specdec.draft.eagle_config import EagleHeadConfig
from specdec.draft.eagle_head import EagleHead, causal_attention
from specdec.draft.rope import RopeConfig, cos_sin, rotate
from specdec.errors import CheckpointError, ConfigError

TINY = EagleHeadConfig(
    kind="eagle3",
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=24,
    vocab_size=40,
    taps=(1, 2, 3),
    own_embeddings=True,
)
EAGLE1 = dataclasses.replace(TINY, kind="eagle1", taps=(-1,), final_norm=False, fc_bias=True, tie_lm_head=True)


def random_head(config: EagleHeadConfig, seed: int = 0) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(config).requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.4)
    return head


def written_out(head: EagleHead, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """One sequence [w d] through the layer, scalar by scalar where it matters: the hidden state before any norm."""
    c, layer = head.config, head.layer

    def norm(x, module):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * module.weight

    if c.kind == "eagle1":
        residual = x = torch.cat([embeddings, features], -1) @ head.fc.weight.T + head.fc.bias
    else:
        residual = features
        x = torch.cat([norm(embeddings, layer.input_layernorm), norm(features, layer.hidden_norm)], -1)
        if c.norm_before_residual:
            residual = norm(features, layer.hidden_norm)
    w, attention = len(x), layer.self_attn
    q, k, v = (p(x).view(w, -1, c.head_dim) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    if c.qk_norm:
        q, k = norm(q, attention.q_norm), norm(k, attention.k_norm)
    half = c.head_dim // 2
    angles = torch.arange(w)[:, None] / c.rope.theta ** (torch.arange(half) * 2 / c.head_dim)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    q, k = (
        torch.view_as_real(torch.complex(r[..., :half], r[..., half:]) * turn).transpose(-1, -2).flatten(-2)
        for r in (q, k)
    )
    out = torch.zeros(w, c.num_heads, c.head_dim)
    for i in range(w):
        for h in range(c.num_heads):
            g = h // (c.num_heads // c.num_kv_heads)
            weights = torch.softmax(k[: i + 1, g] @ q[i, h] / c.head_dim**0.5, 0)
            out[i, h] = weights @ v[: i + 1, g]
    x = residual + attention.o_proj(out.flatten(1))
    y = norm(x, layer.post_attention_layernorm)
    return x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "norm_output": True},
        {"final_norm": False},
        {"qk_norm": True},
        {"attention_bias": True, "output_bias": False, "mlp_bias": True, "fc_bias": True},
        {"rope": RopeConfig(theta=500.0)},
        {"num_kv_heads": 4},
    ],
    ids=str,
)
def test_eagle3_equals_the_written_out_layer(changes: dict) -> None:
    head = random_head(dataclasses.replace(TINY, **changes))
    tokens = torch.randint(0, 40, (1, 7))
    taps = tuple(torch.randn(1, 7, 16) for _ in range(3))
    hidden = head(head.embed(tokens), head.fuse(taps), torch.arange(7)[None], causal_attention(6**-0.5))

    def norm(x, module):
        return x / (x.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps).sqrt() * module.weight

    joined = torch.cat(taps, -1)[0]
    if head.config.norm_before_fc:
        joined = norm(joined, head.input_norm)
    if head.config.fc_norm:
        joined = torch.cat([norm(tap[0], module) for tap, module in zip(taps, head.fc_norm, strict=True)], -1)
    expected = written_out(head, head.embed_tokens.weight[tokens[0]], head.fc(joined))
    normed = norm(expected, head.norm) if head.config.final_norm else expected
    torch.testing.assert_close(head.logits(hidden)[0], normed @ head.lm_head.weight.T, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(hidden[0], normed if head.config.norm_output else expected, atol=2e-4, rtol=1e-4)


def test_eagle1_equals_the_written_out_layer() -> None:
    head = random_head(EAGLE1)
    target_head = torch.randn(40, 16)
    head.borrow(lm_head=target_head)
    tokens, features = torch.randint(0, 40, (1, 7)), torch.randn(1, 7, 16)
    hidden = head(head.embed(tokens), head.fuse((features,)), torch.arange(7)[None], causal_attention(6**-0.5))
    expected = written_out(head, head.embed_tokens.weight[tokens[0]], features[0])
    torch.testing.assert_close(hidden[0], expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(head.logits(hidden)[0], expected @ target_head.T, atol=1e-3, rtol=1e-4)
    assert "layers.0.input_layernorm.weight" not in head.state_dict()
    assert "norm.weight" not in head.state_dict()


def test_tied_lm_head_gives_the_rows_of_the_draft_vocabulary() -> None:
    config = dataclasses.replace(TINY, draft_vocab_size=5, tie_lm_head=True, own_embeddings=False)
    head = random_head(config)
    head.set_vocabulary(torch.tensor([3, 4, 11, 30, 39]))
    weight = torch.randn(40, 16)
    head.borrow(embeddings=weight, lm_head=weight)
    hidden = torch.randn(2, 16)
    full = F.linear(head.lm_input(hidden), weight)
    torch.testing.assert_close(head.logits(hidden), full[:, [3, 4, 11, 30, 39]])
    assert head.d2t.tolist() == [3, 3, 9, 27, 35]
    assert head.t2d.nonzero().flatten().tolist() == [3, 4, 11, 30, 39]
    assert not {"lm_head.weight", "embed_tokens.weight"} & set(head.state_dict())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 3, 4, 40], "expected target ids from 0 to 39, found ids from 1 to 40"),
        ([-1, 2, 3, 4, 5], "found ids from -1 to 5"),
        ([1, 2, 3, 4, 4], "expected 5 distinct target ids, found 4"),
        ([1, 2, 3], r"expected shape \(5,\), found \(3,\)"),
    ],
)
def test_impossible_vocabulary_maps_are_refused(ids: list[int], message: str) -> None:
    head = EagleHead(dataclasses.replace(TINY, draft_vocab_size=5))
    with pytest.raises(CheckpointError, match=f"d2t: .*{message}"):
        head.set_vocabulary(torch.tensor(ids))


def test_weights_that_do_not_fit_the_head_are_refused() -> None:
    head = EagleHead(dataclasses.replace(TINY, own_embeddings=False))
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.weight: expected \(40, 16\) for this head, found \(40, 12\)"
    ):
        head.borrow(embeddings=torch.zeros(40, 12))
    with pytest.raises(ConfigError, match=r"no embed_tokens.weight"):
        head.embed(torch.zeros(1, 1, dtype=torch.long))
    padded = torch.randn(48, 16)
    assert head.borrow(embeddings=padded).embed(torch.tensor([[39]])).equal(padded[None, 39:40])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "eagle7"}, "kind='eagle7'"),
        ({"taps": ()}, r"taps=\(\)"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_kv_heads": 3}, "num_heads=4"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"draft_vocab_size": 41}, "draft_vocab_size=41"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc=True"),
        ({"norm_output": True, "final_norm": False}, "norm_output=True"),
        ({"activation": "swish7"}, "activation='swish7'"),
        ({"kind": "eagle1"}, "taps="),
        ({"kind": "eagle1", "taps": (-1,)}, "final_norm=True"),
        ({"kind": "eagle1", "taps": (-1,), "target_hidden_size": 8}, "target_hidden_size=8"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **changes)


def test_rope_equals_the_library_of_the_targets() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    settings = {
        "default": {},
        "linear": {"factor": 3.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    }
    positions = torch.tensor([[0, 1, 5, 63, 200]])
    q = torch.randn(1, 5, 2, 16)
    for kind, scaling in settings.items():
        parameters = {"rope_type": kind, "rope_theta": 700.0, **scaling}
        theirs = LlamaRotaryEmbedding(
            LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=256, rope_parameters=parameters)
        )
        cos, sin = theirs(q, positions)
        expected, _ = apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
        rope = RopeConfig(700.0, kind, scaling)
        ours = rotate(q, *cos_sin(rope.frequencies(16), positions, rope.attention_factor, torch.float32))
        torch.testing.assert_close(ours.transpose(1, 2), expected, msg=kind)


def test_rope_settings_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match="rope kind='longrope'"):
        RopeConfig(10000.0, "longrope", {"factor": 2.0})
    with pytest.raises(ConfigError, match="lacks factor"):
        RopeConfig(10000.0, "linear")


def test_half_precision_keeps_the_rotation_exact() -> None:
    head = random_head(TINY).to(torch.bfloat16)
    cos, _ = head.cos_sin(torch.tensor([[4001]]))
    exact = torch.cos(4001 * TINY.rope.frequencies(6))
    torch.testing.assert_close(cos[0, 0, :3].float(), exact, atol=4e-3, rtol=0)
