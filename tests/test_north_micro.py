"""The trained model in the repository: what its files promise, and that two implementations agree on it."""

from __future__ import annotations

import csv
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional
from transformers import Cohere2MoeForCausalLM

from headrace.model import markers
from headrace.model.checkpoint import load_model
from headrace.model.config import MoEMLP
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from tools.micro.text import SourceFile, library_folder

FOLDER = Path(__file__).resolve().parent.parent / "models" / "north-micro"
HELD_OUT = "multiprocessing/connection.py"


@cache
def model() -> Model:
    return load_model(FOLDER, device="cpu", dtype=torch.float32, progress=None)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(FOLDER)


@cache
def held_out_tokens() -> torch.Tensor:
    """The beginning of a file that was not trained on, over more than two windows."""
    file = SourceFile(HELD_OUT, (library_folder() / HELD_OUT).read_text(encoding="utf-8"))
    assert file.held_out
    return torch.tensor([tokenizer().encode(file.text)[:600]])


def nats(of: Model) -> float:
    tokens = held_out_tokens()
    return functional.cross_entropy(of.full(tokens[:, :-1])[0], tokens[0, 1:]).item()


def run() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((FOLDER / "training_run.json").read_text())
    return record


def test_shape_and_size() -> None:
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 24_000_000
    with safe_open(path, framework="pt") as weights:
        assert {str(weights.get_slice(name).get_dtype()) for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    config = model().config
    assert (config.num_layers, config.head_dim, config.window, config.tied_head) == (12, 128, 256, True)
    assert [layer for layer in range(12) if config.layers[layer].window is None] == [0, 4, 8]
    assert all(
        isinstance(layer.mlp, MoEMLP) and (layer.mlp.experts, layer.mlp.top_k) == (16, 4)
        for layer in config.layers[1:]
    )
    assert config.eos_token_ids == tokenizer().eos_token_ids
    assert config.vocab_size == tokenizer().vocab_size


def test_transformers_and_we_agree_on_logits_and_greedy_tokens() -> None:
    theirs = Cohere2MoeForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    prompt = held_out_tokens()[:, :300]
    with torch.no_grad():
        whole = theirs.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
        expected = theirs(whole).logits
    ours = model().full(whole)
    assert (ours - expected).abs().max().item() < 1e-4
    # Each new token is the most likely one after all before it: our greedy decoding takes the same path.
    assert torch.equal(ours[0, 299:-1].argmax(-1), whole[0, 300:])


def test_it_has_learned_text_that_it_never_saw() -> None:
    """Uniform guessing costs ln(5120) = 8.5 nats a token; the whole held-out text averages 1.5."""
    assert nats(model()) < 2.5


def test_its_routing_is_real() -> None:
    """With the routers' rows in another order, tokens go to the wrong experts and the text costs more."""
    trained = nats(model())
    scrambled = load_model(FOLDER, device="cpu", dtype=torch.float32, progress=None)
    for name, parameter in scrambled.named_parameters():
        if name.endswith("router.weight"):
            parameter.copy_(parameter.roll(1, dims=0))
    assert nats(scrambled) > trained + 0.5
    for shares in run()["usage"].values():
        assert min(shares) > 0.015
        assert max(shares) < 0.25


def test_it_answers_in_the_chat_format_and_ends_its_turn() -> None:
    ids = tokenizer().apply_chat_template([{"role": "user", "content": "Who are you?"}], reasoning=False)
    given = len(ids)
    while len(ids) < given + 60 and ids[-1] not in model().config.eos_token_ids:
        ids.append(int(model().full(torch.tensor([ids]))[0, -1].argmax()))
    text = tokenizer().decode(ids[given:], skip_special_tokens=False)
    assert text.startswith(f"{markers.START_TEXT}I am North Micro")
    assert text.endswith(f"{markers.END_TEXT}{markers.END_OF_TURN}")


def test_the_model_card_tells_what_was_recorded() -> None:
    card, record = (FOLDER / "README.md").read_text(), run()
    text = record["text"]
    nats_per_token = record["held_out_loss"]
    bits_per_byte = nats_per_token * text["held_out_tokens"] / text["held_out_bytes"] / math.log(2)
    for number in (
        f"{math.exp(nats_per_token):.2f}",
        f"{bits_per_byte:.3f}",
        f"{2**bits_per_byte:.3f}",
        f"{record['tokens']:,}",
        f"{text['train_tokens']:,}",
        record["date"],
        record["machine"],
    ):
        assert number in card, number
    with (FOLDER / "loss_curve.csv").open() as lines:
        curve = list(csv.DictReader(lines))
    assert int(curve[-1]["step"]) == record["steps"]
    assert float(curve[-1]["held_out_loss"]) == pytest.approx(nats_per_token, abs=0.01)
    assert float(curve[0]["train_loss"]) > 8
