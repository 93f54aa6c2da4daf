"""Train a draft head for a model from Python, and see what the training was worth.

On a GPU, for the default model:

    python examples/head_training.py --tokens 20000000 --rows 4096 --output my-head

On a CPU this shows the moves and makes no good head.
"""

import argparse
from pathlib import Path

import specdec
from specdec.draft.eagle import EagleDraftConfig
from specdec.hf.eagle import eagle_drafter, load_eagle_drafter
from specdec.hf.initial_head import HeadShape, initial_head
from specdec.hf.models import DEFAULT_MODEL, load_model
from specdec.stats import SpecStats
from specdec.train.command import train
from specdec.train.pipeline import Place, TrainConfig
from specdec.train.progress import Lines
from specdec.train.selftalk import SelfTalkConfig

DRAFTS = EagleDraftConfig(width=4, depth=4, nodes=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=100_000, help="text that the model writes to learn from")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--length", type=int, default=320, help="tokens of a row of text")
    parser.add_argument("--rows", type=int, default=32, help="rows written at once")
    parser.add_argument("--output", type=Path, default=Path("my-head"))
    arguments = parser.parse_args()

    model, tokenizer = load_model(arguments.model)
    model.requires_grad_(False)
    config = TrainConfig(
        tokens=arguments.tokens,
        epochs=arguments.epochs,
        rows_at_once=arguments.rows,
        batch_rows=min(26, arguments.rows // 2),
        held_out_rows=max(1, arguments.rows // 4),
        talk=SelfTalkConfig(length=arguments.length, max_user_tokens=arguments.length // 3),
        shape=HeadShape(),
    )
    train(model, tokenizer, arguments.model, arguments.output, config, Lines(), Place(model.device))

    untrained = eagle_drafter(initial_head(model, config.shape), model, DRAFTS)
    trained = load_eagle_drafter(arguments.output, model, width=4, depth=4, nodes=16)
    messages = [{"role": "user", "content": "Write a short story about a lighthouse keeper."}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    for name, drafter in (("untrained", untrained), ("trained", trained)):
        records = []
        specdec.generate(model, **inputs, drafter=drafter, on_step=records.append, max_new_tokens=128, do_sample=False)
        print(f"{name} head: τ {SpecStats.of(records).tau:.2f}")


if __name__ == "__main__":
    main()
