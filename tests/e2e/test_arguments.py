"""Arguments of every kind: what is taken as `model.generate` takes it, and what is refused by name before any work."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, MambaConfig, MambaForCausalLM

import specdec
from specdec import HFTarget, SpecConfig
from specdec.draft.scripted import ScriptedDrafter
from specdec.errors import ConfigError, UnsupportedError
from tests.models import VOCAB, tiny_gpt2, tiny_llama, tiny_mistral
from tests.systems import continuation, plain, prompts, speculative


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"position_ids": torch.arange(3, 12)[None]}, "position_ids"),
        ({"inputs_embeds": torch.zeros(1, 9, 32)}, "inputs_embeds"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_before_the_model_runs(model, options, named):
    HFTarget(model)  # its one look at the model is done
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(UnsupportedError, match=named):
            speculative(model, prompts(1, VOCAB), "none", max_new_tokens=4, **options)
    finally:
        hook.remove()
    assert not calls
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_with_tokens_in_it_is_refused_an_empty_one_is_not(model):
    inputs = prompts(1, VOCAB)
    import inspect

    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    filled = DynamicCache()
    model(inputs["input_ids"], **{name: filled})
    with pytest.raises(UnsupportedError, match="tokens in it"):
        speculative(model, inputs, "none", max_new_tokens=4, **{name: filled})
    expected = plain(model, inputs, max_new_tokens=4)
    empty = speculative(model, inputs, "none", max_new_tokens=4, **{name: DynamicCache()})
    assert empty.tolist() == expected.tolist()


@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_cache_settings_of_transformers_do_not_matter(model, options):
    inputs = prompts(1, VOCAB)
    expected = plain(model, inputs, max_new_tokens=6)
    assert speculative(model, inputs, "suffix", max_new_tokens=6, **options).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("drafter", "nosuch", "ngram"),
        ("drafter", "eagle+ngram", "suffix"),
        ("writer", "nosuch", "deferred, direct"),
        ("verifier", "nosuch", "eager"),
        ("attention", "nosuch", "paged, reference"),
    ],
)
def test_unknown_names_are_errors_that_list_the_known_ones(model, option, value, accepted):
    with pytest.raises(ConfigError, match=f"{option}='{value}'".replace("+", r"\+")) as error:
        specdec.generate(model, **prompts(1, VOCAB), max_new_tokens=3, **{option: value})
    for name in accepted.split(", "):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_drafts", 64),
        ("max_drafts", -1),
        ("page_size", 3),
        ("num_pages", 0),
        ("prefill_chunk", 0),
        ("max_drafts", True),
    ],
)
def test_bad_configuration_values_are_named(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        SpecConfig(**{name: value})


def test_unknown_configuration_names_are_named():
    with pytest.raises(ConfigError, match="pagesize=16: unknown option of SpecConfig; accepted: max_drafts"):
        SpecConfig.of(pagesize=16)


def test_max_drafts_bounds_every_draft(model):
    inputs = prompts(2, VOCAB)
    truth = continuation(model, inputs, max_new_tokens=20)
    records = []
    drafter = ScriptedDrafter(truth, VOCAB, depth=9)
    speculative(model, inputs, drafter, max_new_tokens=20, spec_config=SpecConfig(max_drafts=3), on_step=records.append)
    assert max(len(row) for record in records for row in record.draft_tokens) <= 3


def test_encoder_decoder_models_are_refused():
    tiny = BartConfig(
        vocab_size=50,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        specdec.generate(BartForConditionalGeneration(tiny), torch.tensor([[5, 6]]), max_new_tokens=3)


def test_recurrent_models_are_refused():
    tiny = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UnsupportedError, match=r"recurrent|AttentionInterface"):
        specdec.generate(MambaForCausalLM(tiny), torch.tensor([[5, 6]]), max_new_tokens=3)


def test_what_is_no_model_is_refused():
    with pytest.raises(UnsupportedError, match="PreTrainedModel"):
        specdec.generate(torch.nn.Linear(2, 2), torch.tensor([[5, 6]]), max_new_tokens=3)


def test_right_padding_is_refused_with_an_explanation(model):
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    with pytest.raises(ConfigError, match="padding_side='left'"):
        specdec.generate(model, ids, attention_mask=mask, max_new_tokens=3, pad_token_id=0)


def test_masked_tokens_inside_the_prompt_are_invisible(model):
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 0, 1, 1, 1]])}
    expected = plain(model, inputs, max_new_tokens=10)
    assert speculative(model, inputs, "suffix", max_new_tokens=10).tolist() == expected.tolist()
    with pytest.raises(UnsupportedError, match="sliding-window"):
        speculative(tiny_mistral(), inputs, "suffix", max_new_tokens=10)


def test_the_mask_decides_what_padding_is_not_the_ids(model):
    ids = torch.tensor([[0, 0, 5, 6, 7], [0, 5, 0, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": mask}
    options = {"max_new_tokens": 10, "eos_token_id": 0}
    assert speculative(model, inputs, "suffix", **options).tolist() == plain(model, inputs, **options).tolist()


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_padding_does_not_change_the_text(make):
    model, [row] = make(), prompts(1, VOCAB)["input_ids"]
    bare = {"input_ids": row[None], "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    padded = {
        "input_ids": torch.cat([torch.zeros(4, dtype=torch.long), row])[None],
        "attention_mask": torch.tensor([[0] * 4 + [1] * 9]),
    }
    text = speculative(model, bare, "suffix", max_new_tokens=12)[0, 9:]
    assert speculative(model, padded, "suffix", max_new_tokens=12)[0, 13:].tolist() == text.tolist()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_token_type_ids_reach_the_model(num_rows):
    model, inputs = tiny_gpt2(), prompts(num_rows, VOCAB)
    types = torch.randint(0, VOCAB, (num_rows, 9), generator=torch.Generator().manual_seed(1))
    expected = plain(model, inputs, token_type_ids=types, max_new_tokens=12)
    assert expected.tolist() != plain(model, inputs, max_new_tokens=12).tolist()
    drafter = ScriptedDrafter(expected[:, 9:].tolist(), VOCAB, depth=4, siblings=1)
    output = speculative(model, inputs, drafter, token_type_ids=types, max_new_tokens=12)
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
def test_a_prompt_of_one_token(model, drafter):
    inputs = {"input_ids": torch.tensor([[10]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    assert (
        speculative(model, inputs, drafter, max_new_tokens=20).tolist()
        == plain(model, inputs, max_new_tokens=20).tolist()
    )


def test_the_models_own_generate_is_untouched(model):
    inputs = prompts(2, VOCAB)
    config = copy.deepcopy(model.config.to_dict())
    own = copy.deepcopy(model.generation_config.to_dict())
    before = plain(model, inputs, max_new_tokens=10).tolist()
    steps = []
    speculative(
        model,
        inputs,
        "suffix",
        max_new_tokens=10,
        on_step=lambda record: steps.append(plain(model, inputs, max_new_tokens=10).tolist()),
    )
    assert steps and all(step == before for step in steps)
    assert plain(model, inputs, max_new_tokens=10).tolist() == before
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == own


def test_custom_generate_is_one_entry(model):
    inputs = prompts(3, VOCAB)
    expected = plain(model, inputs, do_sample=True, seed=4, max_new_tokens=12)
    torch.manual_seed(4)
    method = specdec.custom_generate(drafter="suffix")
    output = model.generate(**inputs, custom_generate=method, do_sample=True, max_new_tokens=12, pad_token_id=0)
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("copies", [2, 4])
def test_num_return_sequences(model, copies):
    inputs = prompts(2, VOCAB)
    options = {"do_sample": True, "num_return_sequences": copies, "max_new_tokens": 10}
    expected = plain(model, inputs, seed=2, **options)
    assert speculative(model, inputs, "suffix", seed=2, **options).tolist() == expected.tolist()


def test_a_large_batch(model):
    inputs = prompts(64, VOCAB)
    expected = plain(model, inputs, max_new_tokens=8)
    drafter = ScriptedDrafter(expected[:, 9:].tolist(), VOCAB, depth=3, siblings=1)
    assert speculative(model, inputs, drafter, max_new_tokens=8).tolist() == expected.tolist()


@pytest.mark.parametrize("k", [1, 8, 16, 32, 63])
def test_windows_of_every_size(model, k):
    inputs = prompts(1, VOCAB)
    expected = plain(model, inputs, max_new_tokens=70)
    drafter = ScriptedDrafter(expected[:, 9:].tolist(), VOCAB, depth=k)
    records = []
    output = speculative(model, inputs, drafter, max_new_tokens=70, on_step=records.append)
    assert output.tolist() == expected.tolist()
    assert len(records) == -(-70 // (k + 1)), "a perfect drafter is accepted whole, step after step"


def test_learned_positions_are_never_overrun():
    model = tiny_gpt2(n_positions=32)
    inputs = prompts(2, VOCAB)
    expected = plain(model, inputs, max_length=32)
    drafter = ScriptedDrafter(expected[:, 9:].tolist(), VOCAB, depth=7, siblings=2)
    assert speculative(model, inputs, drafter, max_length=32).tolist() == expected.tolist()
