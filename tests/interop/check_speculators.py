"""Heads that we export load in the `speculators` package and compute the same there.

Run by `check_speculators.sh` in an environment of its own, since speculators wants an older transformers than we have.
Exits non-zero at the first difference.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.draft.eagle_config import EagleHeadConfig
from specdec.draft.eagle_head import EagleHead
from specdec.draft.rope import RopeConfig
from specdec.hf.checkpoint_export import Verifier
from specdec.hf.checkpoints import load_head, save_head

STEPS, WIDTH = 3, 9
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict] = {
    "EAGLE-3 as SafeAILab trains it": {},
    "reduced vocabulary": {"draft_vocab_size": 24},
    "norm_before_residual": {"norm_before_residual": True, "draft_vocab_size": 24},
    "as speculators trains": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True, "draft_vocab_size": 24},
    "norm_output alone": {"norm_output": True},
    "q/k norms, five taps": {"qk_norm": True, "taps": (1, 2, 4, 5, 6)},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "own rotation, llama3": {"rope": RopeConfig(5e5, "llama3", LLAMA3)},
    "sliding window": {"sliding_window": 4, "norm_output": True},
    "embedding and lm_head of the target": {"own_embeddings": False, "tie_lm_head": True, "norm_output": True},
    "lm_head rows of the target": {"tie_lm_head": True, "draft_vocab_size": 24},
}


def random_head(seed: int, changes: dict) -> EagleHead:
    torch.manual_seed(seed)
    values = {
        "kind": "eagle3",
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": 80,
        "taps": (1, 3, 5),
        "own_embeddings": True,
        "max_positions": 256,
    }
    head = EagleHead(EagleHeadConfig(**values | changes)).requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    if head.config.reduced:
        head.set_vocabulary(torch.randperm(80)[: head.config.num_draft_tokens].sort().values)
    return head


def our_steps(head: EagleHead, features: torch.Tensor, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states and logits of the unrolled steps: later ones see the keys of step 0 and their own diagonal."""
    config = head.config
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    ages = torch.arange(WIDTH)[:, None] - torch.arange(WIDTH)
    causal = (ages >= 0) & (ages < (config.sliding_window or WIDTH))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys.append(k)
        values.append(v)
        visible = torch.cat([causal] + [torch.eye(WIDTH, dtype=torch.bool)] * (len(keys) - 1), dim=1)
        grouped = (torch.cat(rows, 1).transpose(1, 2) for rows in (keys, values))
        k, v = (rows.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1) for rows in grouped)
        scores = (q.transpose(1, 2) @ k.transpose(2, 3) * config.head_dim**-0.5).masked_fill(~visible, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2)

    hidden = head.fuse(tuple(features.chunk(len(config.taps), dim=-1)))
    results = []
    for step in range(STEPS):
        # speculators counts positions from 1, and moves on by one at each unrolled step.
        positions = torch.arange(WIDTH)[None] + 1 + step
        hidden = head(head.embed(tokens), hidden, positions, attend)
        results.append((hidden, head.logits(hidden)))
        tokens = torch.cat([tokens[:, 1:], tokens.new_zeros(1, 1)], dim=1)
    return results


def their_steps(path: Path, features: torch.Tensor, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same from the package; hidden states are caught where its layer, or its norm, returns them."""
    config = Eagle3SpeculatorConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(path, config=config).eval()
    hidden: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    source = model.norm if model.config.norm_output else model.layers[0]
    source.register_forward_hook(lambda module, args, output: hidden.append(output))
    model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output))
    with torch.no_grad():
        model(features, tokens, torch.zeros(1, WIDTH, dtype=torch.long), ttt_steps=STEPS)
    return list(zip(hidden, logits, strict=True))


def tiny_target(path: Path) -> torch.Tensor:
    """Save a target for the heads, which the package looks into; returns its embedding, which is its lm_head too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    return model.get_input_embeddings().weight.detach()


def check(name: str, seed: int, changes: dict, target: Path, lent: torch.Tensor, directory: Path) -> float:
    head = random_head(seed, changes).borrow(embeddings=lent, lm_head=lent)
    save_head(head, directory, verifier=Verifier(str(target), ("LlamaForCausalLM",)))
    torch.manual_seed(seed + 100)
    features = torch.randn(1, WIDTH, 32 * len(head.config.taps))
    tokens = torch.randint(0, 80, (1, WIDTH))
    ours, theirs = our_steps(head, features, tokens), their_steps(directory, features, tokens)
    again = our_steps(load_head(directory).borrow(embeddings=lent, lm_head=lent), features, tokens)
    worst = 0.0
    for step, (mine, their, read) in enumerate(zip(ours, theirs, again, strict=True)):
        for what, a, b, c in zip(("hidden states", "logits"), mine, their, read, strict=True):
            torch.testing.assert_close(
                a, b, atol=2e-5, rtol=2e-5, msg=lambda m, s=step, w=what: f"{name}, step {s}, {w}: {m}"
            )
            torch.testing.assert_close(a, c, atol=0, rtol=0)
            worst = max(worst, float((a - b).abs().max()))
    return worst


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "target"
        lent = tiny_target(target)
        for seed, (name, changes) in enumerate(VARIANTS.items()):
            worst = check(name, seed, changes, target, lent, Path(scratch) / f"head{seed}")
            print(f"ok  {name}: largest difference {worst:.1e} over {STEPS} steps")


if __name__ == "__main__":
    main()
