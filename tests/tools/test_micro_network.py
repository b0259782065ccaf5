"""North Micro's training pass against the reference model; its training loop and export at a tiny size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.model.build import build_model
from headrace.model.checkpoint import load_model
from headrace.model.config import DenseMLP, MoEMLP
from headrace.model.presets import north_layers
from headrace.model.transformer import Model
from tools.micro import export, training
from tools.micro.data import Corpus
from tools.micro.network import Trainee, balance_loss, hugging_face_config, initialize, micro_config


def tiny(seed: int = 1) -> Model:
    config = replace(
        micro_config(300),
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        layers=north_layers(
            5, window=16, dense=DenseMLP(width=32), routed=MoEMLP(width=16, experts=4, top_k=2)
        ),
    )
    model = build_model(config, device="cpu", dtype=torch.float32)
    initialize(model, seed)
    return model


def corpus(length: int = 4000) -> Corpus:
    """A text that is easy to learn: counting, in documents of 50."""
    tokens = np.arange(length, dtype=np.uint16) % 50
    return Corpus(tokens, np.ones(length, dtype=np.bool_), np.arange(0, length, 50))


def difference(trainee: Trainee, model: Model) -> float:
    tokens = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(3))
    return float((trainee(tokens).logits - model.full(tokens)).abs().max())


@pytest.mark.parametrize("time", [16, 64])
def test_the_fast_pass_equals_the_reference(time: int) -> None:
    model = tiny()
    tokens = torch.randint(0, 300, (2, time), generator=torch.Generator().manual_seed(2))
    out = Trainee(model, time, dropout=0.0)(tokens)
    torch.testing.assert_close(out.logits, model.full(tokens), atol=1e-5, rtol=0)


def test_the_comparison_is_red_for_a_window_of_one_more_and_for_a_lost_expert() -> None:
    model = tiny()
    trainee = Trainee(model, 64, dropout=0.0)
    assert difference(trainee, model) < 1e-5
    rolled = trainee.sequences.blocks.clone()
    rolled[1:, :, :, :-1] |= rolled[1:, :, :, 1:]
    trainee.sequences.blocks = rolled
    assert difference(trainee, model) > 1e-3
    trainee = Trainee(model, 64, dropout=0.0)
    model.get_parameter("blocks.2.mlp.experts.down").data[1].zero_()
    reference = tiny()
    assert difference(trainee, reference) > 1e-3


def test_sequences_must_be_whole_windows() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        Trainee(tiny(), 40, dropout=0.0)


def test_balance_is_one_when_even_and_greatest_when_collapsed() -> None:
    mlp = MoEMLP(width=16, experts=4, top_k=1)
    even = torch.eye(4).repeat(8, 1) * 20
    assert balance_loss(even, mlp).item() == pytest.approx(1.0, abs=1e-4)
    collapsed = torch.full((32, 4), -20.0)
    collapsed[:, 2] = 20
    assert balance_loss(collapsed, mlp).item() == pytest.approx(4.0, abs=1e-4)


def test_training_learns_and_rounds_to_bfloat16() -> None:
    model = tiny()
    recipe = training.Recipe(minutes=1.0, steps=30, batch=4, time=64, learning_rate=1e-2, dropout=0.0)
    outcome = training.train(model, corpus(), corpus(600), recipe)
    assert outcome.steps == 30
    assert outcome.curve[0].loss > 5
    assert outcome.held_out_loss < 3.0  # ln(300) = 5.7 is guessing
    assert outcome.curve[-1].held_out is not None
    for parameter in model.parameters():
        assert torch.equal(parameter, parameter.bfloat16().float())
    for shares in outcome.usage.values():
        assert sum(shares) == pytest.approx(1.0)


def test_training_obeys_the_clock() -> None:
    recipe = training.Recipe(minutes=0.01, steps=10**6, batch=2, time=64)
    outcome = training.train(tiny(), corpus(), corpus(600), recipe)
    assert 0 < outcome.steps < 10**4


def test_the_schedule_rises_and_falls() -> None:
    recipe = training.Recipe(learning_rate=1.0, warm_up=0.1)
    rates = [training.rate(recipe, progress) for progress in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert rates == pytest.approx([0.01, 0.5, 1.0, 0.5, 0.0])


def test_windows_stay_inside_and_carry_the_mask() -> None:
    text = corpus()
    text.learn[::2] = False
    recipe = training.Recipe(batch=3, time=64)
    batches = training.windows(text, recipe, torch.device("cpu"))
    starts = 0
    for _ in range(60):
        tokens, learn = next(batches)
        assert tokens.shape == (3, 65)
        assert torch.equal((tokens[:, 1:] - tokens[:, :-1]) % 50, torch.ones(3, 64, dtype=torch.long))
        assert torch.equal(learn, tokens[:, 1:] % 2 == 1)
        starts += int((tokens[:, 0] == 0).sum())
    assert starts > 40  # about half of the windows that are near a document's start begin there


def test_a_text_that_is_too_short_for_a_batch_is_refused() -> None:
    """There would be no batch, however often one looks."""
    with pytest.raises(ValueError, match="fewer than the 3 of a batch"):
        next(training.windows(corpus(150), training.Recipe(batch=3, time=64), torch.device("cpu")))


def test_export_is_read_back_by_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(micro_config(300), device="cpu", dtype=torch.float32)
    initialize(model, 5)
    export.write_weights(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(300, 3, 1, 0)))
    loaded = load_model(tmp_path, device="cpu", dtype=torch.float32, progress=None)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours.bfloat16().float(), theirs), name
    monkeypatch.setattr(export, "LARGEST_WEIGHTS", 1000)
    with pytest.raises(ValueError, match="choose a smaller shape"):
        export.write_weights(model, tmp_path)
