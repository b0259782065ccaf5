"""Trains models/north-micro, a small real model of North's architecture.

Three stages, each a command, so that only the second needs a GPU:

    python -m tools.train_micro prepare            # text to tokens: build/micro
    python -m tools.train_micro train --compile    # build/micro to build/micro/run (on the GPU)
    python -m tools.train_micro export             # build/micro/run to models/north-micro

The text is the standard library of the interpreter that runs `prepare`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch

from headrace.model.build import build_model
from tools.micro.data import Corpus, prepare
from tools.micro.export import write_folder, write_weights
from tools.micro.network import MAX_POSITIONS, initialize, micro_config
from tools.micro.text import library_folder
from tools.micro.training import Recipe, train

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Parse the command line and run one stage."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_micro", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "micro", help="what prepare makes")
    stages = parser.add_subparsers(dest="stage", required=True)
    first = stages.add_parser("prepare", help="make the tokenizer and the token files")
    first.add_argument("--text", type=Path, default=library_folder(), help="a folder of Python files")
    first.add_argument("--vocabulary", type=int, default=5120)
    first.add_argument("--chats", type=int, default=6000, help="conversations to make from the text")
    first.add_argument("--seed", type=int, default=1)
    second = stages.add_parser("train", help="train and write the weights and the run's record")
    second.add_argument("--out", type=Path, default=None, help="default: run, in the data folder")
    second.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for option in fields(Recipe):
        name = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            second.add_argument(name, action="store_true")
        else:
            second.add_argument(name, type=type(option.default), default=option.default)
    third = stages.add_parser("export", help="assemble the Hugging Face folder")
    third.add_argument("--run", type=Path, default=None, help="default: run, in the data folder")
    third.add_argument("--out", type=Path, default=ROOT / "models" / "north-micro")
    options = parser.parse_args()
    {"prepare": run_prepare, "train": run_train, "export": run_export}[options.stage](options)


def run_prepare(options: argparse.Namespace) -> None:
    """Text to tokens."""
    facts = prepare(
        options.text,
        options.data,
        vocabulary=options.vocabulary,
        chats=options.chats,
        max_positions=MAX_POSITIONS,
        seed=options.seed,
    )
    print(json.dumps(asdict(facts), indent=2))


def run_train(options: argparse.Namespace) -> None:
    """Tokens to weights."""
    begun = time.monotonic()
    recipe = Recipe(**{option.name: getattr(options, option.name) for option in fields(Recipe)})
    if not (options.data / "facts.json").exists():
        sys.exit(
            f"There are no token files in {options.data}: python -m tools.train_micro prepare makes them."
        )
    out = options.out or options.data / "run"
    out.mkdir(parents=True, exist_ok=True)
    facts = json.loads((options.data / "facts.json").read_text())
    torch.set_float32_matmul_precision("high")
    model = build_model(micro_config(facts["vocabulary"]), device=options.device, dtype=torch.float32)
    initialize(model, recipe.seed)
    torch.manual_seed(recipe.seed)
    corpus, held_out = (Corpus.load(options.data / f"{name}.npz") for name in ("train", "held_out"))
    outcome = train(model, corpus, held_out, recipe)
    path = write_weights(model, out)
    record = outcome.facts() | {
        "text": facts,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if model.device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "command": " ".join(["python -m tools.train_micro", *sys.argv[1:]]),
        "process_seconds": time.monotonic() - begun,
    }
    (out / "run.json").write_text(json.dumps(record) + "\n")
    shares = [share for layer in outcome.usage.values() for share in layer]
    print(
        f"{path}: {path.stat().st_size} bytes; {outcome.tokens} tokens in {outcome.seconds:.0f} s, ", end=""
    )
    print(
        f"held out {outcome.held_out_loss:.4f} nats; experts' shares {min(shares):.4f} to {max(shares):.4f}"
    )


def run_export(options: argparse.Namespace) -> None:
    """Weights to a model folder."""
    run = options.run or options.data / "run"
    record = json.loads((run / "run.json").read_text())
    write_folder(run / "model.safetensors", options.data / "tokenizer", record, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
