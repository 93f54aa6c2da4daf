"""The command line: what it prints, its exit status, and errors of one line."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, MambaConfig, T5Config

import specdec
from specdec import cli
from specdec.cli_generate import first_difference
from specdec.cli_terminal import TextOutput
from specdec.errors import ConfigError, UnsupportedError
from specdec.hf.progress import LoadingProgress
from specdec.types import CommitStats, StepRecord
from tests.models import FAMILIES, byte_tokenizer, tiny_gpt2, tiny_llama

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that speaks bytes."""
    path = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(path)
    tiny_llama(vocab_size=257).save_pretrained(path)
    return str(path)


def plain_tokens(folder: str, prompt: str, **arguments: object) -> list[int]:
    """What `model.generate` says to the same prompt."""
    ids = byte_tokenizer()(prompt, return_tensors="pt").input_ids
    model = tiny_llama(vocab_size=257)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **arguments)
    return output[0, ids.shape[1] :].tolist()


def generate(folder: str, *options: str, environment: dict[str, str] | None = None) -> int:
    words = ["generate", "--model", folder, "--device", "cpu", "--max-new-tokens", str(NEW_TOKENS), *options]
    return cli.run(words, environment or {})


def as_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


# --- generate ----------------------------------------------------------------------------------------------------


def test_the_text_is_that_of_generate_and_the_last_line_sums_up(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "--no-chat", "abcabcabc", "--drafter", "ngram") == 0
    *text, summary = capsys.readouterr().out.splitlines()
    expected = byte_tokenizer().decode(plain_tokens(folder, "abcabcabc", do_sample=False), skip_special_tokens=True)
    assert text == expected.splitlines()
    line = r"24 tokens · [\d.]+ tokens/s · τ [\d.]+ · (acceptance \d+%|nothing drafted) · drafter ngram"
    assert re.fullmatch(line, summary), summary


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
@pytest.mark.parametrize("writer", ["deferred", "direct"])
def test_json_holds_tokens_text_settings_and_every_step(
    folder: str, capsys: pytest.CaptureFixture[str], drafter: str, writer: str
) -> None:
    assert generate(folder, "--no-chat", "--json", "--drafter", drafter, "--writer", writer, "abcabcabc") == 0
    result = as_json(capsys)
    assert result["token_ids"] == plain_tokens(folder, "abcabcabc", do_sample=False)
    assert result["text"] == byte_tokenizer().decode(result["token_ids"], skip_special_tokens=True)
    assert result["prompt_ids"] == byte_tokenizer()("abcabcabc").input_ids
    assert [token for step in result["steps"] for token in step["emitted"][0]] == result["token_ids"]
    assert (result["drafter"], result["writer"], result["verifier"]) == (drafter, writer, "eager")
    assert (result["dtype"], result["device"], result["model"]) == ("float32", "cpu", folder)
    assert result["stats"]["emitted"] == NEW_TOKENS
    assert (result["stats"]["drafted"] > 0) == (drafter != "none")


def test_sampling_depends_on_the_seed_alone(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> list[int]:
        assert generate(folder, "--no-chat", "--json", "--temperature", "0.9", "--top-k", "40", "abcabc", *options) == 0
        return as_json(capsys)["token_ids"]

    torch.manual_seed(3)
    expected = plain_tokens(folder, "abcabc", do_sample=True, temperature=0.9, top_k=40)
    assert text("--seed", "3") == text("--seed", "3", "--drafter", "none") == expected
    assert text("--seed", "4") != expected
    assert text() != text()


def test_a_seed_that_was_not_given_is_told(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--no-chat", "--temperature", "1", "abc") == 0
    told = re.search(r" · seed (\d+)$", capsys.readouterr().out)
    assert told
    assert generate(folder, "--no-chat", "--temperature", "1", "--json", "--seed", told[1], "abc") == 0
    assert as_json(capsys)["seed"] == int(told[1])


def test_the_prompt_comes_from_an_argument_a_file_or_standard_input(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("grüße", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("grüße"))
    for source in (["grüße"], ["--prompt-file", str(tmp_path / "prompt.txt")], ["-"]):
        assert generate(folder, "--json", "--no-chat", *source) == 0
        assert as_json(capsys)["prompt_ids"] == byte_tokenizer()("grüße").input_ids


def test_the_chat_template_is_used_where_there_is_one(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--chat"]):
        assert generate(folder, "--json", "hello", *options) == 0
        assert byte_tokenizer().decode(as_json(capsys)["prompt_ids"]) == "user: hello\nassistant: "


def test_show_acceptance_colours_every_token(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert generate(folder, "--no-chat", "--show-acceptance", "abcabcabc") == 0
    output = capsys.readouterr().out
    assert "\x1b[33m" in output
    legend = re.search(r"accepted (\d+).*bonus (\d+).*plain (\d+)", output)
    assert legend
    assert sum(map(int, legend.groups())) == NEW_TOKENS


def record_of(tokens: list[int], num_accepted: int = 0) -> StepRecord:
    return StepRecord(
        0, (0,), [0], [[]], [[]], [list(range(1, num_accepted + 1))], [tokens], [False], CommitStats(1, 1, 0), {}
    )


@pytest.mark.parametrize("text", ["plain", "grüße 🎉 你好", "  two  spaces\n\n\ttab", "cut \N{REPLACEMENT CHARACTER}"])
def test_text_streams_in_pieces_that_add_up(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = TextOutput(byte_tokenizer())
    shown = ""
    for token in byte_tokenizer()(text).input_ids:
        output(record_of([token]))
        shown += capsys.readouterr().out
        assert text.startswith(shown), "never a piece of a character"
    output.end()
    assert shown + capsys.readouterr().out == text + "\n"


def test_text_cut_inside_a_character_is_shown_as_decode_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = byte_tokenizer()("ab🎉").input_ids[:-1]
    output = TextOutput(byte_tokenizer())
    output(record_of(tokens, num_accepted=len(tokens) - 1))
    output.end()
    assert capsys.readouterr().out == byte_tokenizer().decode(tokens) + "\n"
    assert output.counts == {"accepted": len(tokens) - 1, "bonus": 1, "plain": 0}


# --- compare -----------------------------------------------------------------------------------------------------


def test_compare_says_identical(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--no-chat", "--compare", "abcabcabc") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    line = r"24 tokens · [\d.]+ tokens/s by model\.generate\(\) · specdec is [\d.]+× as fast · tokens identical "
    line += r"\(float32\)"
    assert re.fullmatch(line, last), last


@pytest.mark.parametrize(("dtype", "status"), [("fp32", 1), ("bf16", 0)])
def test_compare_fails_on_a_difference_in_fp32_only(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dtype: str, status: int
) -> None:
    honest = specdec.generate

    def lying(model, **arguments):
        sequences = honest(model, **arguments)
        sequences[0, -5] = (sequences[0, -5] + 1) % 256
        return sequences

    monkeypatch.setattr(specdec, "generate", lying)
    assert generate(folder, "--no-chat", "--compare", "--dtype", dtype, "abcabcabc") == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"tokens DIFFER from token \d+ on \(top-2 gap of the logits there: ", last), last
    assert generate(folder, "--no-chat", "--compare", "--json", "--dtype", dtype, "abcabcabc") == status
    result = as_json(capsys)["compare"]
    assert result["identical"] is False
    assert result["first_difference"] <= NEW_TOKENS - 5


@pytest.mark.parametrize(
    ("ours", "theirs", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([5], [4, 5], 0)],
)
def test_first_difference(ours: list[int], theirs: list[int], index: int | None) -> None:
    assert first_difference(ours, theirs) == index


@pytest.mark.slow
@pytest.mark.parametrize(("options", "drafter"), [([], "eagle"), (["--drafter", "suffix"], "suffix")])
def test_the_real_model_answers_as_generate_does(
    capsys: pytest.CaptureFixture[str], smollm2, options: list[str], drafter: str
) -> None:
    words = ["generate", "--compare", "--json", "--dtype", "fp32", "--device", "cpu", "--max-new-tokens", "32"]
    assert cli.run([*words, *options, "Repeat after me: one two three, one two three, one two three."], {}) == 0
    result = as_json(capsys)
    assert result["drafter"] == drafter
    assert result["compare"]["identical"] is True
    assert result["stats"]["accepted"] > 0
    assert "one two three" in result["text"].lower()


# --- info --------------------------------------------------------------------------------------------------------

ATTENTION = {
    "llama": ["2 layers: 2 KV heads of 8"],
    "mistral": ["2 layers: 2 KV heads of 8, sliding window 8"],
    "gemma2": ["1 layers: 2 KV heads of 8, sliding window 8, soft cap 5", "1 layers: 2 KV heads of 8, soft cap 5"],
    "gemma3": ["1 layers: 2 KV heads of 8, sliding window 8", "1 layers: 2 KV heads of 8"],
    "qwen3": ["2 layers: 2 KV heads of 16"],
    "gpt_neox": ["2 layers: 4 KV heads of 8"],
    "gpt2": ["2 layers: 4 KV heads of 8"],
    "gpt_oss": [
        "1 layers: 2 KV heads of 8, sliding window 8, attention sinks",
        "1 layers: 2 KV heads of 8, attention sinks",
    ],
}
ROPE = {"gpt2": [], "gpt_oss": ["yarn"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_info_describes_every_family(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    model = FAMILIES[family]()
    model.config.save_pretrained(tmp_path)
    assert cli.run(["info", str(tmp_path), "--json"], {}) == 0
    result = as_json(capsys)
    target = specdec.HFTarget(model)
    assert (result["supported"], result["why_not"]) == (True, None)
    assert result["num_parameters"] == model.num_parameters()
    assert result["cache_bytes_per_token"] == target.profile.bytes_per_token
    assert result["attention"] == ATTENTION.get(family, result["attention"])
    assert result["rope_types"] == ROPE.get(family, ["default"])
    assert result["vocab_size"] == 101
    assert result["chat_template"] is True


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(architectures=["T5ForConditionalGeneration"]), "Unrecognized configuration class"),
        (MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=64), "recurrent layers"),
    ],
)
def test_info_says_why_a_model_is_not_supported(
    config, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    assert cli.run(["info", str(tmp_path)], {}) == 0
    assert re.search(rf"supported +no: .*{reason}", capsys.readouterr().out)


def test_info_says_so_where_only_the_weights_would_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads_a_number(*args: object, **kwargs: object) -> None:
        torch.empty(1, device="meta").item()

    byte_tokenizer().save_pretrained(tmp_path)
    tiny_llama().config.save_pretrained(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "forward", reads_a_number)
    assert cli.run(["info", str(tmp_path)], {}) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "supported not known before it is loaded: its code does not run without weights (Tensor.item()" in shown


def test_info_prints_a_table_and_names_rope_that_no_graph_can_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    tiny_llama(rope_parameters=rope).config.save_pretrained(tmp_path)
    assert cli.run(["info", str(tmp_path), "--dtype", "bf16"], {}) == 0
    output = capsys.readouterr().out
    assert re.search(r"cache +128 bytes a token \(bfloat16\)", output)
    assert re.search(r"supported +yes", output)
    assert "rope type 'dynamic' reads lengths on the host" in output


# --- errors and environment --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "give one prompt"),
        (["generate", "x", "--prompt-file", "y"], "give one prompt"),
        (["generate", "--prompt-file", "nowhere"], "--prompt-file nowhere cannot be read"),
        (["generate", "  \n"], "the prompt is empty"),
        (
            ["generate", "x", "--nonsense"],
            "No such option: --nonsense (Possible options: --seed); see specdec generate --help",
        ),
        (["generate", "x", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens': "),
        (["generate", "x", "--top-p", "0.9"], "--top-p 0.9 has no effect on greedy decoding"),
        (["generate", "x", "--dtype", "int3"], "dtype='int3' is not known; accepted: auto, bf16, fp16, fp32"),
        (["generate", "x", "--model", "./nowhere"], "model='./nowhere': there is no such file or folder"),
        (
            ["generate", "x", "--model", "FOLDER", "--drafter", "magic"],
            "drafter='magic' is not known; accepted: none, ngram",
        ),
        (
            ["generate", "x", "--model", "FOLDER", "--writer", "magic"],
            "writer='magic' is not known; accepted: deferred, direct",
        ),
        (["generate", "x", "--model", "FOLDER", "--verifier", "magic"], "verifier='magic' is not known; accepted: "),
        (["info", "FOLDER/config.json"], "accepted: a .gguf file, a model folder, or a hub id"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_an_error_is_one_line_and_status_2(
    folder: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.run([word.replace("FOLDER", folder) for word in words], {}) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(rf"specdec: .*{re.escape(message)}.*\n", shown.err), shown.err


def test_chat_without_a_template_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    tiny_gpt2(vocab_size=257).save_pretrained(tmp_path)
    assert generate(str(tmp_path), "--chat", "x") == 2
    assert "has no chat template; use --no-chat" in capsys.readouterr().err
    assert generate(str(tmp_path), "x") == 0


def test_an_unexpected_error_is_one_line_too_and_debug_shows_it(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*args: object, **kwargs: object) -> None:
        raise KeyError("no such [red]thing")

    monkeypatch.setattr(specdec, "generate", breaks)
    assert generate(folder, "x") == 2
    expected = "specdec: unexpected KeyError: 'no such [red]thing'; run again with --debug for the traceback\n"
    assert capsys.readouterr().err == expected
    for place in (0, 1, 4):
        words = ["generate", "x", "--model", folder]
        words.insert(place, "--debug")
        with pytest.raises(KeyError):
            cli.run(words, {})


def test_debug_behind_a_double_dash_is_a_prompt() -> None:
    assert cli.take_debug(["generate", "--", "--debug"]) == (False, ["generate", "--", "--debug"])
    assert cli.take_debug(["--debug", "generate", "--", "--debug"]) == (True, ["generate", "--", "--debug"])


def test_an_interrupt_ends_quietly(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(specdec, "generate", interrupted)
    assert generate(folder, "x") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_the_environment_sets_defaults_that_options_override(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    direct = {"SPECDEC_KV_WRITER": "direct"}
    assert generate(folder, "--json", "x", environment=direct) == 0
    assert as_json(capsys)["writer"] == "direct"
    assert generate(folder, "--json", "x", "--writer", "deferred", environment=direct) == 0
    assert as_json(capsys)["writer"] == "deferred"


def test_an_unknown_writer_in_the_environment_is_an_error_that_names_the_variable(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "x", environment={"SPECDEC_KV_WRITER": "defered"}) == 2
    assert "SPECDEC_KV_WRITER='defered' is not known; accepted: deferred, direct" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SPECDEC_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/specdec"),
        ({"SPECDEC_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"SPECDEC_CACHE": ""}, None),
    ],
)
def test_where_the_cache_lies(environment: dict[str, str], expected: str | None) -> None:
    assert cli.defaults_from(environment).get("cache_dir") == expected


def test_only_the_command_line_reads_the_environment() -> None:
    package = Path(specdec.__file__).parent
    reading = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
                reading.add(file.relative_to(package).as_posix())
    assert reading == {"cli.py"}


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "specdec", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(command in done.stdout for command in cli.COMMANDS)


def test_a_tokenizer_that_cannot_stream_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UnsupportedError, match="Slow cannot decode token by token; use --json"):
        TextOutput(Slow())


def test_defaults_are_checked_before_anything_else() -> None:
    with pytest.raises(ConfigError, match="SPECDEC_KV_WRITER"):
        cli.defaults_from({"SPECDEC_KV_WRITER": ""})


def test_loading_says_each_slow_stage_once_and_hides_foreign_bars(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadingProgress() as progress:
        for done in (0, 10, 20):
            progress("Downloading it", done, 20)
        print("a bar of somebody else", file=sys.stderr)
        progress("Loading the model", 0, 0)
    print("afterwards", file=sys.stderr)
    assert capsys.readouterr().err == "Downloading it ...\nafterwards\n"
