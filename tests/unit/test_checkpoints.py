"""Reading and writing heads: every format, and every way in which real checkpoints differ from what one expects."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.draft.eagle_config import EagleHeadConfig
from specdec.draft.eagle_head import EagleHead, causal_attention
from specdec.draft.rope import RopeConfig
from specdec.errors import CheckpointError, ConfigError, UnsupportedError
from specdec.hf.checkpoint_formats import TargetShape
from specdec.hf.checkpoints import load_head, save_head
from tests.unit.test_eagle_head import random_head

H, V, D = 16, 40, 10
TARGET = TargetShape(hidden_size=H, vocab_size=V, num_layers=8)
LLAMA = {
    "hidden_size": H,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}
"""Head size 4."""
IDS = torch.tensor([1, 2, 5, 7, 11, 12, 20, 21, 30, 39])


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.4


def layer(prefix: str, width: int) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.self_attn.q_proj.weight": numbers(16, width),
        f"{prefix}.self_attn.k_proj.weight": numbers(8, width),
        f"{prefix}.self_attn.v_proj.weight": numbers(8, width),
        f"{prefix}.self_attn.o_proj.weight": numbers(H, 16),
        f"{prefix}.mlp.gate_proj.weight": numbers(24, H),
        f"{prefix}.mlp.up_proj.weight": numbers(24, H),
        f"{prefix}.mlp.down_proj.weight": numbers(H, 24),
        f"{prefix}.post_attention_layernorm.weight": numbers(H),
    }


def vocabulary() -> dict[str, torch.Tensor]:
    return {"d2t": IDS - torch.arange(D), "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, IDS, True)}


def eagle1_files() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """SafeAILab's EAGLE-1 and 2."""
    tensors = {"fc.weight": numbers(H, 2 * H), "fc.bias": numbers(H), **layer("layers.0", H)}
    return {**LLAMA, "architectures": ["LlamaForCausalLM"]}, tensors


def eagle3_files(prefix: str = "midlayer", num_taps: int = 3) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """SafeAILab's EAGLE-3."""
    tensors = {
        "fc.weight": numbers(H, num_taps * H),
        "lm_head.weight": numbers(D, H),
        "norm.weight": numbers(H),
        f"{prefix}.hidden_norm.weight": numbers(H),
        f"{prefix}.input_layernorm.weight": numbers(H),
        **layer(prefix, 2 * H),
        **vocabulary(),
    }
    return {**LLAMA, "draft_vocab_size": D, "architectures": ["LlamaForCausalLM"]}, tensors


def speculators_files(**flags: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """speculators' `eagle3`."""
    _, tensors = eagle3_files("layers.0")
    tensors["embed_tokens.weight"] = numbers(V, H)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = numbers(3 * H)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": numbers(H) for i in range(3)}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**LLAMA, "model_type": "llama"},
        "draft_vocab_size": D,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        **flags,
    }
    return config, tensors


def put(directory: Path, files: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> Path:
    config, tensors = files
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def run(head: EagleHead, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Some logits of a head over fixed inputs, so that two heads compare; `weight` is lent."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(V, H, generator=generator) if weight is None else weight
    head.borrow(embeddings=weight, lm_head=weight)
    taps = tuple(torch.randn(1, 6, H, generator=generator) for _ in head.config.taps)
    tokens = torch.randint(0, V, (1, 6), generator=generator)
    attend = causal_attention(head.config.head_dim**-0.5)
    hidden = head(head.embed(tokens), head.fuse(taps), torch.arange(6)[None], attend)
    return head.logits(hidden)


# -- formats ----------------------------------------------------------------------------------------------------------


def test_eagle1_of_safeailab(tmp_path: Path) -> None:
    config, tensors = eagle1_files()
    head = load_head(put(tmp_path, (config, tensors)), TARGET)
    assert head.config.kind == "eagle1" and head.config.taps == (-1,)
    assert head.config.fc_bias and head.config.tie_lm_head and not head.config.own_embeddings
    assert head.layer.input_layernorm is None and head.norm is None
    assert head.fc.weight.equal(tensors["fc.weight"])
    assert run(head).shape == (1, 6, V)


def test_eagle1_without_bias_says_so(tmp_path: Path) -> None:
    config, tensors = eagle1_files()
    del tensors["fc.bias"]
    assert load_head(put(tmp_path, ({**config, "bias": False}, tensors)), TARGET).fc.bias is None
    with pytest.raises(CheckpointError, match=r"fc.bias: expected shape \(16,\), found no such tensor"):
        load_head(put(tmp_path, ({**config, "bias": True}, tensors)), TARGET)


def test_eagle3_of_safeailab(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    head = load_head(put(tmp_path, (config, tensors)), TARGET)
    assert head.config.taps == (2, 4, 5)
    assert head.config.vocab_size == V and head.config.num_draft_tokens == D
    assert head.target_ids.equal(IDS)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert not any(getattr(head.config, name) for name in flags)
    assert head.layer.self_attn.q_proj.weight.equal(tensors["midlayer.self_attn.q_proj.weight"])
    assert run(head).shape == (1, 6, D)


def test_eagle3_with_the_whole_vocabulary_has_no_map(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    del config["draft_vocab_size"], tensors["d2t"], tensors["t2d"]
    tensors["lm_head.weight"] = numbers(V, H)
    head = load_head(put(tmp_path, (config, tensors)), TARGET)
    assert not head.config.reduced and head.target_ids.equal(torch.arange(V))


def test_specforge(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    tensors |= {f"fc_norm.{i}.weight": numbers(H) for i in range(3)}
    head = load_head(put(tmp_path, (config, tensors)), TARGET)
    assert head.config.fc_norm and head.config.taps == (2, 4, 5)
    assert head.config.rope == RopeConfig(500.0, "linear", {"factor": 2.0})


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "norm_output": True},
    ],
    ids=str,
)
def test_speculators(tmp_path: Path, flags: dict[str, bool]) -> None:
    head = load_head(put(tmp_path, speculators_files(**flags)), TARGET)
    assert head.config.taps == (1, 4, 6)
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert getattr(head.config, name) is flags.get(name, False)
    assert head.embed_tokens is not None


def test_deepspec_heads_have_five_taps_and_full_vocabulary(tmp_path: Path) -> None:
    config, tensors = eagle3_files("layers.0", num_taps=5)
    del config["draft_vocab_size"], tensors["d2t"], tensors["t2d"]
    tensors["lm_head.weight"] = numbers(V, H)
    tensors |= {"layers.0.self_attn.q_norm.weight": numbers(4), "layers.0.self_attn.k_norm.weight": numbers(4)}
    config |= {"target_layer_ids": [0, 2, 3, 5, 6], "num_target_layers": 8, "architectures": ["Qwen3Eagle3Model"]}
    head = load_head(put(tmp_path, (config, tensors)))
    assert head.config.taps == (1, 3, 4, 6, 7) and head.config.qk_norm
    assert head.fc.weight.shape == (H, 5 * H)


def test_nemo_saves_with_a_prefix(tmp_path: Path) -> None:
    config, tensors = eagle3_files("layers.0")
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    head = load_head(put(tmp_path / "a", (config, prefixed)), TARGET)
    plain = load_head(put(tmp_path / "b", (config, tensors)), TARGET)
    assert run(head).equal(run(plain))


# -- traps ------------------------------------------------------------------------------------------------------------


def test_d2t_holds_offsets(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    head = load_head(put(tmp_path, (config, tensors)), TARGET)
    assert [i + int(offset) for i, offset in enumerate(tensors["d2t"])] == head.target_ids.tolist()


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (IDS, r"d2t: expected target ids from 0 to 39, found ids from 1 to 48"),
        (torch.zeros(D, dtype=torch.long), r"t2d: expected shape \(40,\), true at the 10 ids of d2t"),
        (-torch.arange(D), r"d2t: expected 10 distinct target ids, found 1"),
        (torch.zeros(D - 1, dtype=torch.long), r"d2t: expected shape \(10,\), found \(9,\)"),
    ],
)
def test_maps_that_cannot_be_are_refused(tmp_path: Path, d2t: torch.Tensor, message: str) -> None:
    config, tensors = eagle3_files()
    with pytest.raises(CheckpointError, match=message):
        load_head(put(tmp_path, (config, tensors | {"d2t": d2t})), TARGET)


def test_a_reduced_vocabulary_needs_its_map(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    del tensors["d2t"]
    with pytest.raises(CheckpointError, match=r"d2t: expected shape \(10,\) for a draft vocabulary of 10 of 40 tokens"):
        load_head(put(tmp_path, (config, tensors)), TARGET)


def test_norm_output_means_feedback_except_in_specforge(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    elsewhere = load_head(put(tmp_path / "a", ({**config, "norm_output": True}, tensors)), TARGET)
    assert elsewhere.config.norm_output and elsewhere.config.final_norm
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    on = load_head(put(tmp_path / "b", ({**config, "norm_output": True}, tensors)), TARGET)
    assert not on.config.norm_output and on.config.final_norm
    del tensors["norm.weight"]
    off = load_head(put(tmp_path / "c", ({**config, "norm_output": False}, tensors)), TARGET)
    assert not off.config.norm_output and not off.config.final_norm


@pytest.mark.parametrize(
    ("keys", "taps"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (3, 5, 6)),
        ({"target_layer_ids": [2, 4, 5]}, (3, 5, 6)),
        ({"aux_hidden_states_layer_ids": [2, 4, 5]}, (3, 5, 6)),
        ({"aux_hidden_states_layer_ids": [1, 3, 4], "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, (2, 4, 5)),
        ({}, (2, 4, 5)),
    ],
    ids=str,
)
def test_layer_ids_number_inputs_here_and_outputs_there(tmp_path: Path, keys: dict, taps: tuple[int, ...]) -> None:
    config, tensors = eagle3_files()
    assert load_head(put(tmp_path, (config | keys, tensors)), TARGET).config.taps == taps


def test_layer_ids_nobody_can_know_are_asked_for(tmp_path: Path) -> None:
    path = put(tmp_path, eagle3_files())
    with pytest.raises(CheckpointError, match=r"expected eagle_aux_hidden_state_layer_ids or target_layer_ids"):
        load_head(path)
    assert load_head(path, taps=(1, 2, 3)).config.taps == (1, 2, 3)
    with pytest.raises(
        CheckpointError, match=r"target_layer_ids: expected layers of a target of 8 layers, found \[1, 7\]"
    ):
        load_head(put(tmp_path, ({**eagle3_files()[0], "target_layer_ids": [1, 7]}, eagle3_files()[1])), TARGET)


def test_fc_is_as_wide_as_the_layer_ids_say(tmp_path: Path) -> None:
    config, tensors = eagle3_files(num_taps=2)
    with pytest.raises(CheckpointError, match=r"fc.weight: expected shape \(16, 48\), found \(16, 32\)"):
        load_head(put(tmp_path, (config, tensors)), TARGET)
    assert load_head(put(tmp_path, (config | {"target_layer_ids": [1, 5]}, tensors)), TARGET).config.taps == (2, 6)


def test_rope_is_the_heads_own(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    assert load_head(put(tmp_path, (config, tensors)), TARGET).config.rope.theta == 10000.0
    for keys, expected in (
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            RopeConfig(5e5, "linear", {"factor": 4.0}),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}, RopeConfig(7e5)),
    ):
        assert load_head(put(tmp_path, (config | keys, tensors)), TARGET).config.rope == expected
    with pytest.raises(ConfigError, match=r"rope kind='longrope'"):
        load_head(put(tmp_path, (config | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, tensors)), TARGET)


def test_a_window_that_is_only_named_is_not_used(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    assert load_head(put(tmp_path, (config | {"sliding_window": 8}, tensors)), TARGET).config.sliding_window is None
    used = config | {"sliding_window": 8, "layer_types": ["sliding_attention"]}
    assert load_head(put(tmp_path, (used, tensors)), TARGET).config.sliding_window == 8


def test_embedding_and_head_keep_their_own_sizes(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    head = load_head(put(tmp_path, (config, tensors | {"embed_tokens.weight": numbers(V, H)})), TARGET)
    assert head.embedding_weight.shape == (V, H) and head.lm_head_weight.shape == (D, H)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fc.weight", lambda t: t[:, :32], r"fc.weight: expected shape \(16, 48\), found \(16, 32\)"),
        ("norm.weight", lambda t: None, r"norm.weight: expected shape \(16,\), found no such tensor"),
        (
            "midlayer.mlp.up_proj.weight",
            lambda t: t.T,
            r"layers.0.mlp.up_proj.weight: expected shape \(24, 16\), found \(16, 24\)",
        ),
        (
            "lm_head.weight",
            lambda t: t.index_fill(0, torch.tensor([3]), torch.nan),
            r"lm_head.weight: .* found 16 that are not",
        ),
        ("lm_head.weight", lambda t: t[:9], r"lm_head.weight: expected shape \(10, 16\), found \(9, 16\)"),
        ("fc.weight", lambda t: t.long(), r"fc.weight: expected floating-point numbers .* found torch.int64"),
        ("midlayer.extra.weight", lambda t: numbers(3), r"layers.0.extra.weight: expected no such tensor .* \(3,\)"),
        ("fc_norm.0.weight", lambda t: numbers(H), r"fc_norm.1.weight: expected shape \(16,\), found no such tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,  # the same in every xdist worker
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str, change: Any, message: str) -> None:
    config, tensors = eagle3_files()
    tensors[name] = change(tensors.get(name))
    with pytest.raises(CheckpointError, match=message):
        load_head(put(tmp_path, (config, {n: t for n, t in tensors.items() if t is not None})), TARGET)


def test_a_missing_norm_is_not_made_up(tmp_path: Path) -> None:
    config, tensors = speculators_files(norm_before_fc=True)
    del tensors["input_norm.weight"]
    with pytest.raises(CheckpointError, match=r"input_norm.weight: expected shape \(48,\), found no such tensor"):
        load_head(put(tmp_path, (config, tensors)), TARGET)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (dataclasses.replace(TARGET, hidden_size=20), r"fc.weight: expected shape \(16, 60\) .* found \(16, 48\)"),
        (
            dataclasses.replace(TARGET, vocab_size=48),
            r"embed_tokens.weight: expected shape \(48, 16\) .* found \(40, 16\)",
        ),
    ],
)
def test_heads_of_another_target_are_refused(tmp_path: Path, target: TargetShape, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_head(put(tmp_path, eagle3_files()), target)


def test_a_narrower_head_needs_embeddings_of_its_own(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    tensors["fc.weight"] = numbers(H, 3 * 20)
    config["target_hidden_size"] = 20
    target = dataclasses.replace(TARGET, hidden_size=20)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: expected a tensor of width 16"):
        load_head(put(tmp_path, (config, tensors)), target)
    head = load_head(put(tmp_path, (config, tensors | {"embed_tokens.weight": numbers(V, H)})), target)
    assert head.fuse(tuple(torch.randn(1, 2, 20) for _ in range(3))).shape == (1, 2, H)


def test_more_than_one_layer_is_refused(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    with pytest.raises(UnsupportedError, match=r"num_hidden_layers=2"):
        load_head(put(tmp_path, (config | {"num_hidden_layers": 2}, tensors)), TARGET)


# -- other kinds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "config", "names"),
    [
        ("peagle", {"speculators_model_type": "peagle"}, ["fc.weight"]),
        ("dflash", {"architectures": ["DFlashDraftModel"]}, ["fc.weight"]),
        ("dflash", {"dflash_config": {"target_layer_ids": [1]}}, ["fc.weight"]),
        ("dflash2", {"speculators_model_type": "dflash2"}, ["fc.weight"]),
        ("dspark", {"architectures": ["Qwen3DSparkModel"]}, ["fc.weight"]),
        ("mtp", {"speculators_model_type": "mtp"}, ["fc.weight"]),
        ("mtp", {}, ["mtp.fc.weight"]),
        ("medusa", {"medusa_num_heads": 4}, ["0.0.linear.weight"]),
        ("medusa", {}, ["0.0.linear.weight", "1.1.weight"]),
        ("hydra", {"hydra_num_heads": 4}, ["hydra_mlp.0.weight"]),
    ],
)
def test_other_draft_models_are_refused_by_name(tmp_path: Path, kind: str, config: dict, names: list[str]) -> None:
    with pytest.raises(UnsupportedError, match=f"a {kind} draft model"):
        load_head(put(tmp_path, (config, {name: numbers(2) for name in names})), TARGET)


def test_files_that_are_no_head_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"expected fc.weight, layers.0.self_attn.q_proj.weight, found lm_head.weight"
    ):
        load_head(put(tmp_path, (LLAMA, {"lm_head.weight": numbers(2)})))
    with pytest.raises(UnsupportedError, match=r"speculators_model_type='independent'"):
        load_head(put(tmp_path, ({"speculators_model_type": "independent"}, {"a": numbers(2)})))


# -- files ------------------------------------------------------------------------------------------------------------


def test_bin_files_are_read_as_tensors_only(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert load_head(tmp_path, TARGET).fc.weight.equal(tensors["fc.weight"])

    class Harmful:
        def __reduce__(self):
            return (Path.mkdir, (tmp_path / "harm",))

    torch.save({"fc.weight": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: expected tensors only"):
        load_head(tmp_path, TARGET)
    assert not (tmp_path / "harm").exists()


def test_sharded_files_are_read_together(tmp_path: Path) -> None:
    config, tensors = eagle3_files()
    names = sorted(tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for part, members in (("a.safetensors", names[:5]), ("b.safetensors", names[5:])):
        save_file({name: tensors[name] for name in members}, tmp_path / part)
        weight_map |= dict.fromkeys(members, part)
    with pytest.raises(
        CheckpointError, match=r"expected one .safetensors file or model.safetensors.index.json, found a"
    ):
        load_head(tmp_path, TARGET)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load_head(tmp_path, TARGET).fc.weight.equal(tensors["fc.weight"])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b.safetensors: expected this file, which the index names"):
        load_head(tmp_path, TARGET)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a config.json, found an empty directory"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: expected JSON"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"expected a JSON object, found list"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"expected model.safetensors or pytorch_model.bin, found config.json"):
        load_head(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: expected readable tensors"):
        load_head(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected a directory with config.json"):
        load_head(tmp_path / "config.json")


# -- writing ----------------------------------------------------------------------------------------------------------


def test_a_safeailab_round_trip_is_bit_exact(tmp_path: Path) -> None:
    for name, files in (("one", eagle1_files()), ("three", eagle3_files())):
        for dtype in (torch.float32, torch.bfloat16):
            config, tensors = files
            tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
            tensors["embed_tokens.weight"] = numbers(V, H).to(dtype)
            head = load_head(put(tmp_path / name, (config, tensors)), TARGET)
            save_head(head, tmp_path / "again", "safeailab", standalone=False)
            again = load_file(tmp_path / "again" / "model.safetensors")
            assert again.keys() == tensors.keys()
            for key, tensor in tensors.items():
                assert again[key].dtype == tensor.dtype and again[key].equal(tensor), key
            assert load_head(tmp_path / "again", TARGET).config == head.config


FULL = EagleHeadConfig(
    kind="eagle3",
    hidden_size=H,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=24,
    vocab_size=V,
    taps=(1, 4, 6),
    draft_vocab_size=D,
    max_positions=512,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "own_embeddings": True},
        {"fc_norm": True, "norm_output": True, "tie_lm_head": True},
        {"qk_norm": True, "draft_vocab_size": None, "taps": (1, 2, 3, 4, 5)},
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope": RopeConfig(5e5, "linear", {"factor": 2.0}),
            "sliding_window": 4,
        },
    ],
    ids=str,
)
def test_a_speculators_round_trip_keeps_everything(tmp_path: Path, changes: dict) -> None:
    head = random_head(dataclasses.replace(FULL, **changes))
    if head.config.reduced:
        head.set_vocabulary(IDS)
    head.set_token_order(torch.randperm(V))
    save_head(head, tmp_path, standalone=False)
    again = load_head(tmp_path, TARGET)
    assert run(again).equal(run(head))
    assert again.token_order is not None and again.token_order.equal(head.token_order)
    same = {"output_bias", "draft_vocab_size", "target_hidden_size"}
    for field in dataclasses.fields(EagleHeadConfig):
        if field.name not in same:
            assert getattr(again.config, field.name) == getattr(head.config, field.name), field.name


def test_lent_weights_are_written_unless_asked_not_to(tmp_path: Path) -> None:
    head = random_head(dataclasses.replace(FULL, tie_lm_head=True, draft_vocab_size=None))
    weight = torch.randn(V, H)
    head.borrow(embeddings=weight, lm_head=weight)
    save_head(head, tmp_path / "small", standalone=False)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / "small" / "model.safetensors"))
    save_head(head, tmp_path / "whole")
    assert load_file(tmp_path / "whole" / "model.safetensors")["lm_head.weight"].equal(weight)
    whole = load_head(tmp_path / "whole", TARGET)
    assert whole.embed_tokens is not None and not whole.config.tie_lm_head
    assert run(whole, torch.zeros(V, H)).equal(run(head, weight))


@pytest.mark.parametrize(
    ("format", "changes", "message"),
    [
        ("safeailab", {"norm_output": True}, "safeailab format cannot express norm_output=True"),
        ("safeailab", {"fc_norm": True}, "safeailab format cannot express fc_norm=True"),
        ("safeailab", {"tie_lm_head": True}, "safeailab format cannot express lm_head=False"),
        ("speculators", {"fc_bias": True}, "speculators format cannot express fc_bias=True"),
        ("speculators", {"final_norm": False}, "speculators format cannot express final_norm=False"),
        ("speculators", {"attention_bias": True, "output_bias": False}, "cannot express output_bias=False"),
        ("speculators", {"qk_norm": True, "mlp_bias": True}, "cannot express mlp_bias=True"),
    ],
    ids=str,
)
def test_what_a_format_cannot_express_is_refused(tmp_path: Path, format: str, changes: dict, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        save_head(random_head(dataclasses.replace(FULL, **changes)), tmp_path, format, standalone=False)
    assert not list(tmp_path.iterdir())


def test_unknown_formats_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"format='gguf' is not known; accepted: safeailab, speculators"):
        save_head(random_head(FULL), tmp_path, "gguf")
    with pytest.raises(ConfigError, match=r"the head has no embed_tokens.weight; lend it the target's"):
        save_head(random_head(FULL), tmp_path)
    with pytest.raises(ConfigError, match=r"norm_of_everything=True: unknown option of EagleHeadConfig"):
        load_head(put(tmp_path, eagle3_files()), TARGET, norm_of_everything=True)
