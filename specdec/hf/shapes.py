"""Llama models of a given shape with random weights, for measuring: speed does not depend on what weights say."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def random_llama(
    *,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    vocab: int,
    tied: bool,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> PreTrainedModel:
    """A model in evaluation mode, made on the device; it is never on the host."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=16384,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    # The rotation's frequencies are no parameters, so nobody would fill them in.
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    return model.eval()
