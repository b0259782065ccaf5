"""Which backend is chosen, and what is said where the kernel cannot be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
import torch

from headrace.engine import build
from headrace.engine.decode import choose_decode, make_backend
from headrace.engine.kernel_backend import KernelBackend
from headrace.engine.options import EngineOptions, OptionError
from headrace.engine.torch_backend import TorchBackend
from headrace.kernel import support
from headrace.model.config import KVGroup, ModelConfig, Rope
from headrace.model.kv import KVCache
from headrace.model.presets import PRESETS
from headrace.model.synthetic import synthetic_model
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from headrace.step.pack import pack_model
from tests.kernel.llamas import LLAMA_3B, LLAMA_8B

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NORTH, LLAMA = PRESETS["north-mini-code"], PRESETS["llama-3.2-1b"]
TWO_KINDS = replace(LLAMA.layers[0], rope=Rope.INTERLEAVED)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that looks like one with a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(support, "has_compiler", lambda: True)
    return monkeypatch


def chosen(
    decode: str,
    config: ModelConfig = NORTH,
    *,
    device: torch.device = GPU,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 16,
) -> str:
    options = EngineOptions(decode=decode, max_sequences=rows)
    return choose_decode(options, config, device=device, dtype=dtype)


def test_the_kernel_is_taken_where_it_can_run(hopper: pytest.MonkeyPatch) -> None:
    assert chosen("auto") == chosen("kernel") == "kernel"
    assert chosen("torch") == "torch"


@pytest.mark.parametrize("config", [PRESETS["smollm2-135m"], LLAMA, LLAMA_3B, LLAMA_8B])
def test_llamas_are_decoded_by_the_kernel(hopper: pytest.MonkeyPatch, config: ModelConfig) -> None:
    assert chosen("auto", config) == chosen("kernel", config) == "kernel"


@pytest.mark.parametrize(
    ("config", "device", "dtype", "rows", "words"),
    [
        (NORTH, CPU, torch.bfloat16, 16, "Hopper GPU only"),
        (NORTH, GPU, torch.float32, 16, "bfloat16 only"),
        (NORTH, GPU, torch.bfloat16, 17, "at most 16 sequences"),
        (replace(LLAMA, num_kv_heads=16), GPU, torch.bfloat16, 16, "up to 8 KV heads, not 16"),
        (replace(LLAMA, num_kv_heads=2), GPU, torch.bfloat16, 16, "up to 8 query heads"),
        (replace(LLAMA, hidden_size=8192), GPU, torch.bfloat16, 16, "a hidden_size of 8192"),
        (replace(LLAMA, layers=(TWO_KINDS, *LLAMA.layers)), GPU, torch.bfloat16, 16, "one kind of rotary"),
    ],
)
def test_elsewhere_auto_is_torch_and_the_kernel_is_refused(
    hopper: pytest.MonkeyPatch,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    words: str,
) -> None:
    assert chosen("auto", config, device=device, dtype=dtype, rows=rows) == "torch"
    with pytest.raises(OptionError, match=words):
        chosen("kernel", config, device=device, dtype=dtype, rows=rows)


@pytest.mark.parametrize(
    ("decode", "heads", "told"),
    [
        ("auto", 16, ["Decoding with PyTorch and not the kernel: the kernel takes up to 8 KV heads, not 16"]),
        ("torch", 16, []),
        ("auto", 8, []),
    ],
)
def test_a_start_says_why_it_is_torch_unless_that_was_asked_for(
    decode: str, heads: int, told: list[str], hopper: pytest.MonkeyPatch
) -> None:
    class StopError(Exception):
        """Raised where the pool is sized: no GPU is needed until then."""

    def size_pool(*_: object, **__: object) -> NoReturn:
        raise StopError

    hopper.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**30, 144 * 2**30))
    hopper.setattr(build, "size_pool", size_pool)
    hopper.setattr(build, "pack_model", lambda *_, **__: None)
    config = replace(LLAMA, num_kv_heads=heads)
    model = cast(Model, SimpleNamespace(config=config, device=GPU, dtype=torch.bfloat16))
    lines: list[str] = []
    with pytest.raises(StopError):
        build.build_engine(model, cast(Tokenizer, None), EngineOptions(decode=decode), say=lines.append)
    assert [line.partition(": decode with")[0] for line in lines] == told


def test_another_gpu_and_a_missing_package_are_named(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(support, "has_compiler", lambda: False)
    with pytest.raises(OptionError, match=r"pip install 'headrace\[gpu\]'"):
        chosen("kernel")
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(OptionError, match=r"a GPU has 8\.0"):
        chosen("kernel")


def test_kernel_and_prefill_share_the_pages_of_one_cache() -> None:
    config = PRESETS["north-micro-shape"]
    model = synthetic_model(config, dtype=torch.bfloat16)
    cache = KVCache(config, dict.fromkeys(KVGroup, 2), dtype=torch.bfloat16)
    weights = pack_model(model, device="cpu", dtype=torch.bfloat16)
    options = EngineOptions(max_sequences=4)
    backend, prefiller = make_backend("kernel", model, cache, options, weights=weights, max_context=128)
    assert isinstance(backend, KernelBackend)
    assert isinstance(prefiller, TorchBackend)
    assert prefiller._cache is cache
    assert backend._kernels._cache is cache  # type: ignore[attr-defined]
