"""A Llama from its checkpoint to its answers: packed as it is read, prompts by the model over the pages, and
the kernel in the engine. The emulated one against transformers in float32; on a GPU SmolLM2's own weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from headrace.engine import build, decode
from headrace.engine.build import build_engine
from headrace.engine.engine import Engine
from headrace.engine.kernel_backend import KernelBackend
from headrace.engine.options import EngineOptions
from headrace.kernel.launcher import Launcher
from headrace.kernel.pool import KernelPool
from headrace.load import load
from headrace.model.sampling import SamplingParams
from headrace.model.tokenizer import Tokenizer
from headrace.step import pack
from headrace.step.pack import pack_checkpoint
from headrace.step.packed_model import packed_model
from headrace.step.planner import build_plan
from tests.engine.north import generate
from tests.kernel.emulated import COMPILER
from tests.kernel.emulated.libraries import SMS, Libraries
from tests.kernel.prompts import PROMPTS
from tests.kernel.test_rehearsal import Played
from tests.model.reference import LLAMA3_ROPE, Reference, make_reference
from tests.model.test_gguf import write_gguf
from tests.recording import RecordCheck

pytestmark = pytest.mark.timeout(240)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

Logits = Callable[[Tensor], Tensor]  # [1, time, vocabulary] of token ids [1, time], in float32

LENGTHS, TOKENS = (62, 9), 5  # the first one's answer goes on in a second block
NEAR = 0.2  # logits in their deviation: what bfloat16 may put a token behind the likeliest; PyTorch does 0.07
FIELDS: dict[str, Any] = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 160, "head_dim": 32}


@pytest.fixture
def on_hopper(libraries: Libraries, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What a start finds on a machine with a Hopper GPU, whose kernels are emulated ones."""

    class EmulatedPool(KernelPool):
        def prepare(self) -> None:
            config = self._weights.config
            for rows in self._capacities:
                plan = build_plan(config, rows=rows, sms=SMS)
                library = libraries.library(config, rows, SMS, False, None)
                kernel = Played(plan, self._weights, self._cache, self._table_blocks, library)
                self._launchers[rows] = cast(Launcher, kernel)

    monkeypatch.setattr(build, "choose_decode", lambda *_, **__: "kernel")
    monkeypatch.setattr(decode, "KernelPool", EmulatedPool)
    return monkeypatch


def written(folder: Path, kind: str, **fields: Any) -> tuple[Path, Reference]:
    """A small Llama of transformers as a checkpoint of this kind."""
    theirs = make_reference(folder, "llama", FIELDS | fields)
    return (write_gguf(folder / "model.gguf", theirs) if kind == "gguf" else folder), theirs


def engine_over(path: Path, *, unpacked: int) -> Engine:
    weights = pack_checkpoint(path, device="cpu", dtype=torch.bfloat16)
    options = EngineOptions(max_sequences=2, max_context=256, unpacked_layers=unpacked)
    model = packed_model(weights, kept=unpacked)
    tokenizer = Tokenizer.synthetic(model.config.vocab_size)
    return build_engine(model, tokenizer, options, weights=weights, unpacked=unpacked)


def behind(logits_of: Logits, prompt: list[int], made: list[int]) -> float:
    """How far the tokens made are behind the likeliest at most, each after those before it."""
    with torch.no_grad():
        logits = logits_of(torch.tensor([prompt + made]))[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
    return float(((logits.amax(1) - chosen) / logits.std(1)).max())


def worst(engine: Engine, prompts: list[list[int]], count: int, logits_of: Logits) -> float:
    """How far the tokens of prompts that are decoded side by side, after a rehearsal, are behind at most."""
    engine.rehearse()
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)] * len(prompts)
    made = generate(engine, prompts, params)
    assert [len(tokens) for tokens in made] == [count] * len(prompts)
    return max(behind(logits_of, *each) for each in zip(prompts, made, strict=True))


def emulated_worst(path: Path, theirs: Reference, *, unpacked: int = 0) -> float:
    given = theirs.tokens[0].tolist()
    prompts, engine = [given[:length] for length in LENGTHS], engine_over(path, unpacked=unpacked)
    assert isinstance(engine._backend, KernelBackend)
    return worst(engine, prompts, TOKENS, lambda tokens: theirs.model(tokens).logits)


@needs_compiler
@pytest.mark.parametrize(("kind", "tied", "unpacked"), [("folder", True, 2), ("gguf", False, 0)])
def test_tokens_are_those_of_transformers_up_to_a_near_tie(
    kind: str, tied: bool, unpacked: int, on_hopper: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scaled: dict[str, Any] = {"rope_parameters": LLAMA3_ROPE} if kind == "folder" else {}
    path, theirs = written(tmp_path, kind, tie_word_embeddings=tied, **scaled)
    assert emulated_worst(path, theirs, unpacked=unpacked) <= NEAR


@needs_compiler
def test_rows_that_are_packed_in_pairs_are_seen(on_hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, theirs = written(tmp_path, "gguf")
    on_hopper.setattr(pack, "unpair", lambda rows, heads: rows)
    assert emulated_worst(path, theirs) > 3 * NEAR


def own_weights_worst(source: str, device: str, *, decode: str) -> float:
    """Of a model that was trained, with prompts as people would give them, eight at a time."""
    options = EngineOptions(decode=decode, max_sequences=8, max_context=512)
    loaded = load(source, device=device, dtype="bfloat16", options=options, weights_cache="none")
    engine = build_engine(
        loaded.model, loaded.tokenizer, options, weights=loaded.weights, unpacked=loaded.unpacked
    )
    assert isinstance(engine._backend, KernelBackend) == (decode == "auto")
    exact = load(source, device=device, dtype="float32").model
    prompts = [loaded.tokenizer.encode(prompt) for prompt in PROMPTS[:8]]
    return worst(engine, prompts, 32, lambda tokens: exact.full(tokens.to(device)).cpu())


def test_the_way_of_own_weights_without_a_gpu() -> None:
    assert own_weights_worst("north-micro", "cpu", decode="torch") <= NEAR


@pytest.mark.gpu
def test_smollm2s_own_weights(record_check: RecordCheck) -> None:
    """That auto takes the kernel for it is part of this."""
    behind_by = own_weights_worst("smollm2", "cuda", decode="auto")
    record_check(
        "tokens of SmolLM2's own weights, behind float32's, in deviations of its logits", behind_by, NEAR
    )
