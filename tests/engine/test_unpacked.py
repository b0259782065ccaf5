"""Layers that stay unpacked for prompts: they are counted, told of, and refused where they are of no use."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
import torch

from headrace import load as loading
from headrace.engine import build
from headrace.engine.build import build_engine
from headrace.engine.options import EngineOptions, OptionError
from headrace.engine.unpacked import check_unpacked, unpacked_layers
from headrace.load import load
from headrace.model.memory import prompt_bytes
from headrace.model.presets import NORTH_MINI_CODE, PRESETS
from headrace.model.synthetic import synthetic_model
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from headrace.step.pack import PackedWeights, pack_model
from headrace.step.packed_model import packed_model

GPU, DTYPE = torch.device("cuda"), torch.bfloat16
GIB = 2**30
LAYERS = 49


def free_on_the_gpu(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), 144 * GIB))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Layers and KV heads of whatever models are made over packed weights, on a CPU that can do as a GPU."""
    made: list[tuple[int, int]] = []

    def noted(weights: object, *, kept: int = 0) -> Model:
        model = packed_model(weights, kept=kept)  # type: ignore[arg-type]
        made.append((kept, model.config.num_layers))
        return model

    monkeypatch.setattr(loading, "packed_model", noted)
    monkeypatch.setattr(loading, "choose_decode", lambda *parts, **named: "kernel")
    return made


@pytest.mark.parametrize("source", ["north-micro", None], ids=["checkpoint", "synthetic"])
def test_as_many_layers_stay_unpacked_as_one_says(source: str | None, made: list[tuple[int, int]]) -> None:
    synthetic = None if source else "north-micro-shape"
    for count in (0, 3):
        options = EngineOptions(unpacked_layers=count)
        load(
            source, synthetic=synthetic, device="cpu", dtype="bfloat16", options=options, weights_cache="none"
        )
    assert [count for count, _ in made] == [0, 3]


def test_more_than_there_are_is_refused_before_weights_are_read(
    made: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = PRESETS["north-micro-shape"].num_layers

    def never(*parts: object, **named: object) -> NoReturn:
        raise AssertionError("weights were made")

    monkeypatch.setattr(loading, "pack_synthetic", never)
    options = EngineOptions(unpacked_layers=layers + 1)
    with pytest.raises(OptionError, match=f"is {layers + 1}, but the model has {layers} layers") as caught:
        load(None, synthetic="north-micro-shape", device="cpu", dtype="bfloat16", options=options)
    assert caught.value.option == "unpacked_layers"
    everything = EngineOptions(unpacked_layers=layers)
    check_unpacked(everything, PRESETS["north-micro-shape"], decode="kernel", device=GPU, dtype=DTYPE)


@pytest.mark.parametrize(
    ("named", "decode", "words"),
    [
        ("auto", "torch", "Hopper GPU only"),
        ("torch", "torch", "--decode torch was given"),
        ("oracle", "oracle", "--decode oracle was given"),
    ],
)
def test_where_nothing_is_packed_one_is_told_why(named: str, decode: str, words: str) -> None:
    options = EngineOptions(unpacked_layers=1, decode=named)
    cpu = torch.device("cpu")
    with pytest.raises(OptionError, match=words) as caught:
        check_unpacked(options, NORTH_MINI_CODE, decode=decode, device=cpu, dtype=DTYPE)
    assert "Leave it out" in str(caught.value)
    check_unpacked(
        replace(options, unpacked_layers=0), NORTH_MINI_CODE, decode=decode, device=cpu, dtype=DTYPE
    )


def refusal(options: EngineOptions) -> str | None:
    try:
        unpacked_layers(options, NORTH_MINI_CODE, device=GPU, dtype=DTYPE)
    except OptionError as error:
        return str(error)
    return None


def expected_bytes(layers: int) -> int:
    """Of so many of North's layers that have experts: the matrices of 128 of them, and attention's."""
    experts = 128 * 3 * 2048 * 768
    attention = 2048 * 128 * (2 * 32 + 2 * 4)
    return layers * (experts + attention + 128 * 2048) * DTYPE.itemsize


@pytest.mark.parametrize("free", [30 * GIB, 50 * GIB, 70 * GIB])
def test_what_is_refused_would_not_have_fitted_and_what_is_advised_fits(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Beside them there has to be room for the largest pass, and some of it for KV."""
    free_on_the_gpu(monkeypatch, free)
    message = refusal(EngineOptions(unpacked_layers=48))
    tight = free < 60 * GIB
    assert (message is not None) == tight
    if message is None:
        return
    assert message.startswith("unpacked_layers: is 48")
    advised = re.search(r"give at most (\d+),", message)
    assert advised is not None
    most = int(advised[1])
    assert refusal(EngineOptions(unpacked_layers=most)) is None
    assert refusal(EngineOptions(unpacked_layers=most + 1)) is not None
    chunk = EngineOptions().on_gpu(144 * GIB).chunk
    a_pass = prompt_bytes(NORTH_MINI_CODE, tokens=chunk, context=NORTH_MINI_CODE.max_positions, dtype=DTYPE)
    left = free - expected_bytes(most + 2)  # two more are scratch memory in any case
    assert 1.4 * a_pass < left < 1.6 * a_pass + expected_bytes(1) + GIB


def test_the_kv_that_is_asked_for_has_to_fit_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    free_on_the_gpu(monkeypatch, 80 * GIB)
    assert refusal(EngineOptions(unpacked_layers=40, kv_memory=15 * GIB)) is None
    message = refusal(EngineOptions(unpacked_layers=40, kv_memory=30 * GIB))
    assert message is not None
    assert "--kv-memory" in message
    assert refusal(EngineOptions(unpacked_layers=48)) is None, "contexts are as long as the memory allows"
    assert refusal(EngineOptions(unpacked_layers=48, max_context=500_000)) is not None


def test_where_not_even_one_fits_none_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    free_on_the_gpu(monkeypatch, 5 * GIB)
    assert "leave it out" in (refusal(EngineOptions(unpacked_layers=1)) or "")


def test_a_model_that_would_not_fit_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = SimpleNamespace(config=NORTH_MINI_CODE, data=SimpleNamespace(device=GPU, dtype=DTYPE))
    free_on_the_gpu(monkeypatch, 20 * GIB)
    monkeypatch.setattr(loading, "packed_model", lambda *_, **__: pytest.fail("memory was taken"))
    with pytest.raises(OptionError, match="unpacked_layers: is 48: these layers take"):
        loading._unpacking(weights, EngineOptions(unpacked_layers=48))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 2])
def test_a_start_says_what_they_take_and_what_is_left(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = synthetic_model(PRESETS["north-micro-shape"], dtype=DTYPE)
    weights = pack_model(model, device="cpu", dtype=DTYPE)
    told: list[str] = []
    monkeypatch.setattr(build, "choose_decode", lambda *_, **__: "kernel")
    backend = SimpleNamespace(prepare=lambda: None, max_rows=1, max_steps=1)
    monkeypatch.setattr(build, "make_backend", lambda *_, **__: (backend, backend))
    monkeypatch.setattr(build, "scratch_bytes", lambda config, kept, dtype: (3 + 2 * kept) * GIB)
    options = EngineOptions(unpacked_layers=count, max_context=512, kv_memory=256 * 2**20)
    build_engine(model, cast(Tokenizer, None), options, weights=weights, unpacked=count, say=told.append)
    if not count:
        assert told == []
        return
    (line,) = told
    assert f"2 of {model.config.num_layers} layers stay unpacked for prompts, in 4.0 GiB" in line
    assert "for contexts of up to 512 tokens" in line


@pytest.mark.parametrize(("asked", "lines"), [(None, 1), (0, 0)])
def test_where_a_gpu_has_no_room_for_any_a_start_says_so_unless_none_was_asked_for(
    asked: int | None, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopError(Exception):
        """Raised where the pool is sized: no GPU is needed until then."""

    def size_pool(*_: object, **__: object) -> NoReturn:
        raise StopError

    free_on_the_gpu(monkeypatch, 20 * GIB)
    monkeypatch.setattr(build, "choose_decode", lambda *_, **__: "kernel")
    monkeypatch.setattr(build, "size_pool", size_pool)
    model, weights = SimpleNamespace(config=NORTH_MINI_CODE, device=GPU, dtype=DTYPE), SimpleNamespace()
    options, told = EngineOptions(unpacked_layers=asked), list[str]()
    with pytest.raises(StopError):
        build_engine(
            cast(Model, model),
            cast(Tokenizer, None),
            options,
            weights=cast(PackedWeights, weights),
            say=told.append,
        )
    assert [line[:29] for line in told] == ["No layers stay unpacked for p"] * lines


def test_a_pool_that_is_too_small_says_that_fewer_unpacked_layers_would_help() -> None:
    for count in (0, 2):
        options = EngineOptions(unpacked_layers=count, max_context=4096, kv_memory=2**20)
        with pytest.raises(OptionError, match="give more memory") as caught:
            build.size_pool(NORTH_MINI_CODE, options, available=0, dtype=DTYPE)
        assert ("fewer unpacked_layers" in str(caught.value)) == bool(count)
