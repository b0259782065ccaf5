"""A trained model as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.model.export import stored_tensors
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from tools.micro.network import hugging_face_config

# GitHub-sized repositories and the project's limit: the whole weights file stays below this.
LARGEST_WEIGHTS = 24_000_000


def write_weights(model: Model, folder: Path) -> Path:
    """model.safetensors, in bfloat16; refused above the size that the repository allows."""
    path = folder / "model.safetensors"
    weights = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in stored_tensors(model).items()}
    save_file(weights, path, metadata={"format": "pt"})
    if (size := path.stat().st_size) > LARGEST_WEIGHTS:
        raise ValueError(f"{path} takes {size} bytes, more than {LARGEST_WEIGHTS}: choose a smaller shape")
    return path


def write_folder(weights: Path, tokenizer_folder: Path, run: Mapping[str, object], out: Path) -> None:
    """All of the folder but its model card: weights, tokenizer, configurations and the run's record."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(weights, out / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer_folder / name, out / name)
    tokenizer = Tokenizer.from_pretrained(out)
    pad, bos = 0, 1
    (end,) = tokenizer.eos_token_ids
    config = hugging_face_config(tokenizer.vocab_size, end, bos, pad)
    _write_json(out / "config.json", config)
    _write_json(
        out / "generation_config.json", {"bos_token_id": bos, "eos_token_id": end, "pad_token_id": pad}
    )
    curve = run["curve"]
    assert isinstance(curve, list)
    rows = ["step,seconds,tokens,train_loss,balance,held_out_loss"]
    for line in curve:
        held_out = "" if line["held_out"] is None else f"{line['held_out']:.4f}"
        rows.append(
            f"{line['step']},{line['seconds']:.1f},{line['tokens']},{line['loss']:.4f},"
            f"{line['balance']:.4f},{held_out}"
        )
    (out / "loss_curve.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    _write_json(out / "training_run.json", {key: value for key, value in run.items() if key != "curve"})


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
