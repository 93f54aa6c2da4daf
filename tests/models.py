"""Tiny random models of many families, for tests.

`initializer_range` 0.4 makes their greedy text varied: with the usual 0.02 it falls into a cycle of three tokens.
Every factory takes a seed and any further config keyword; the weights depend on these alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

VOCAB = 101
"""Token ids of every tiny model; a prime, so that no kernel's tile divides it."""

COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    initializer_range=0.4,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
    tie_word_embeddings=False,
)


def build(config: PreTrainedConfig, seed: int = 0, attention: str | None = None) -> PreTrainedModel:
    """An fp32 model of `config`, ready for inference; the weights depend on the seed alone, and the global RNG is kept.

    Norm scales, biases and attention sinks, which every family initialises to ones or zeros, are drawn too: a model in
    which they do nothing would not notice them missing.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1 and weight.is_floating_point():
                    weight.add_(torch.randn_like(weight), alpha=0.5 if name.endswith(("bias", "sinks")) else 0.1)
    return model.eval().requires_grad_(False)


def tiny_llama(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Grouped-query attention and nothing special."""
    return build(LlamaConfig(**{**COMMON, **overrides}), seed)


def tiny_mistral(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Every layer with a sliding window of 8."""
    return build(MistralConfig(**{**COMMON, "sliding_window": 8, **overrides}), seed)


def tiny_mixtral(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A mixture of four experts, two for each token."""
    return build(MixtralConfig(**{**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, **overrides}), seed)


def tiny_qwen2(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Biases in q, k and v."""
    return build(Qwen2Config(**{**COMMON, **overrides}), seed)


def tiny_qwen3(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Norms on q and k; a head size that is not hidden size over heads."""
    return build(Qwen3Config(**{**COMMON, "head_dim": 16, **overrides}), seed)


def tiny_gemma2(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Soft-capped attention and logits, sliding window of 8 in every other layer, own attention scale.

    Eager attention: transformers 5.17 picks SDPA, which leaves the soft cap out.
    """
    special = {"sliding_window": 8, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0}
    return build(Gemma2Config(**{**COMMON, **special, **overrides}), seed, attention="eager")


def tiny_gemma3(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """One sliding layer with its own rope, one full layer; norms on q and k."""
    special = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 12}
    return build(Gemma3TextConfig(**{**COMMON, **special, **overrides}), seed)


def tiny_phi3(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """One matrix for q, k and v."""
    return build(Phi3Config(**{**COMMON, **overrides}), seed)


def tiny_gpt2(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Learned positions, multi-head attention, biases everywhere."""
    own = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.4)
    rest = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
    return build(GPT2Config(**{**own, **rest, **overrides}), seed)


def tiny_gpt_neox(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Parallel attention and MLP, rope on a quarter of each head."""
    own = {k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")}
    return build(GPTNeoXConfig(**{**own, **overrides}), seed)


def tiny_olmo2(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Norms behind attention and MLP, and on q and k over all heads."""
    return build(Olmo2Config(**{**COMMON, "initializer_range": 0.6, **overrides}), seed)


def tiny_granite(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Multipliers on embeddings, attention, residuals and logits."""
    special = {
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.8,
        "logits_scaling": 1.5,
    }
    return build(GraniteConfig(**{**COMMON, **special, **overrides}), seed)


def tiny_cohere2(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Parallel blocks; a sliding layer with rope, then a full layer without any."""
    special = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.5}
    return build(Cohere2Config(**{**COMMON, **special, **overrides}), seed)


def tiny_gpt_oss(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Attention sinks, experts, sliding window of 8 in every other layer."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    special = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": yarn}
    return build(GptOssConfig(**{**COMMON, **special, **overrides}), seed)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, `<end>` (id 256), and a chat template: for models with a vocabulary of at least 257."""
    alphabet = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(BPE(alphabet, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<end>")
    tokenizer.chat_template = template + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    return tokenizer


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "mixtral": tiny_mixtral,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "gemma2": tiny_gemma2,
    "gemma3": tiny_gemma3,
    "phi3": tiny_phi3,
    "gpt2": tiny_gpt2,
    "gpt_neox": tiny_gpt_neox,
    "olmo2": tiny_olmo2,
    "granite": tiny_granite,
    "cohere2": tiny_cohere2,
    "gpt_oss": tiny_gpt_oss,
}
"""One factory per family, for parametrised tests."""
