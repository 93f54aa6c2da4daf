"""Scales from checkpoints, and decoding over pages that use them."""

import pytest
import torch
from safetensors.torch import save_file

import specdec
from specdec import SpecConfig
from specdec.errors import CheckpointError
from specdec.hf.kv_scales import read_kv_scales
from tests.models import VOCAB, tiny_llama
from tests.systems import prompts

NAMES = ("self_attn.{0}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.{0}_proj.output_scale")


def save(folder, tensors):
    save_file({name: torch.tensor(value) for name, value in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("pattern", NAMES)
def test_names(pattern, tmp_path):
    scales = {f"model.layers.{i}.{pattern.format(kind)}": 0.01 * (i + 1) for i in range(11) for kind in "kv"}
    save(tmp_path, {**scales, "model.layers.0.self_attn.k_proj.weight": [1.0], "model.norm.weight": [1.0]})
    read = read_kv_scales(tmp_path)
    assert len(read) == 11 and read[10] == (pytest.approx(0.11), pytest.approx(0.11))


def test_scales_may_lie_in_several_files(tmp_path):
    for i in range(2):
        tensors = {f"model.layers.{i}.self_attn.{kind}_scale": torch.tensor([2.0 + i]) for kind in "kv"}
        save_file(tensors, tmp_path / f"model-{i}.safetensors")
    assert read_kv_scales(tmp_path) == ((2.0, 2.0), (3.0, 3.0))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.norm.weight": [1.0]}, "has no K/V scales"),
        ({"model.layers.0.self_attn.k_scale": 1.0}, "lacks v_scale of layer 0"),
        ({"model.layers.0.self_attn.k_scale": -1.0}, "k_scale is -1.0; expected one positive number"),
        ({"model.layers.0.self_attn.k_scale": [1.0, 2.0]}, "expected one positive number"),
        ({"model.layers.0.self_attn.k_scale": float("nan")}, "expected one positive number"),
    ],
)
def test_what_is_wrong_is_named(tensors, message, tmp_path):
    save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message):
        read_kv_scales(tmp_path)


def test_decoding_with_them(tmp_path):
    model, inputs = tiny_llama(), prompts(2, VOCAB)
    save(tmp_path, {f"model.layers.{i}.self_attn.{kind}_scale": 0.05 for i in range(2) for kind in "kv"})
    config = SpecConfig(kv_dtype="int8", kv_scales=read_kv_scales(tmp_path))
    options = dict(spec_config=config, max_new_tokens=16, pad_token_id=0)
    expected = specdec.generate(model, **inputs, drafter="none", **options)
    assert specdec.generate(model, **inputs, drafter="suffix", **options).tolist() == expected.tolist()
