"""Which backend decodes, and how it is put together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.engine.backend import DecodeBackend, Prefiller
from headrace.engine.kernel_backend import KernelBackend
from headrace.engine.options import EngineOptions, OptionError
from headrace.engine.oracle_backend import OracleBackend
from headrace.engine.torch_backend import TorchBackend
from headrace.kernel.pool import KernelPool
from headrace.kernel.prompt import passes
from headrace.kernel.support import obstacle
from headrace.model.config import ModelConfig
from headrace.model.kv import KVCache
from headrace.model.transformer import Model
from headrace.step.errors import PlanError
from headrace.step.isa import MAX_ROWS
from headrace.step.pack import PackedWeights
from headrace.step.sizes import check_model


def choose_decode(
    options: EngineOptions, config: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> str:
    """The backend that `options.decode` means for this model: "kernel", "torch" or "oracle".

    "auto" is the kernel where it can run, and PyTorch elsewhere. Raises OptionError if the one that is named
    cannot run.
    """
    if options.decode == "torch":
        return "torch"
    if options.decode == "oracle":
        _check_oracle(options, config, device)
        return "oracle"
    reason = kernel_obstacle(options, config, device=device, dtype=dtype)
    if reason is None:
        return "kernel"
    if options.decode == "kernel":
        raise OptionError("decode", f"kernel cannot decode here: {reason}")
    return "torch"


def kernel_obstacle(
    options: EngineOptions, config: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why the kernel cannot decode under these options; None: it can."""
    if options.max_sequences > MAX_ROWS:
        return f"it decodes at most {MAX_ROWS} sequences at a time: give --max-sequences {MAX_ROWS} or less"
    return obstacle(config, device=device, dtype=dtype)


def make_backend(
    decode: str,
    model: Model,
    cache: KVCache,
    options: EngineOptions,
    *,
    weights: PackedWeights | None,
    max_context: int,
    say: Callable[[str], None] | None = None,
) -> tuple[DecodeBackend, Prefiller]:
    """The backend called `decode`, and what fills prompts, over the model and its KV pages.

    The kernel needs packed `weights`.

    `say` gets a line if the kernel has to be compiled.
    """
    rows, steps = options.max_sequences, options.steps
    if decode == "oracle":
        oracle = OracleBackend(model, cache, max_rows=rows, max_steps=steps)
        return oracle, oracle
    fuse(model, cache, weights)
    torch_backend = TorchBackend(model, cache, max_rows=rows, max_steps=steps)
    if decode == "torch":
        return torch_backend, torch_backend
    if weights is None:
        raise ValueError("the kernel reads packed weights, and there are none")
    kernels = KernelPool(weights, cache, max_rows=rows, max_context=max_context, progress=say)
    return KernelBackend(kernels, max_rows=rows, max_steps=steps), torch_backend


def fuse(model: Model, cache: KVCache, weights: PackedWeights | None = None) -> bool:
    """Have prompts take the fused steps where the GPU and the model allow it; whether they do."""
    if model.dtype != torch.bfloat16 or not passes.fits(model.config) or not passes.available(model.device):
        return False
    fused = passes.Passes()
    model.use(fused)
    cache.fused = fused
    if weights is not None:
        weights.fused = fused
    return True


def _check_oracle(options: EngineOptions, config: ModelConfig, device: torch.device) -> None:
    if options.max_sequences > MAX_ROWS:
        raise OptionError(
            "max_sequences", f"is {options.max_sequences}; the oracle decodes at most {MAX_ROWS} at a time"
        )
    if device.type != "cpu":
        raise OptionError("decode", "the oracle runs on a CPU only; run the model there with --device cpu")
    try:
        check_model(config)
    except PlanError as error:
        raise OptionError("decode", f"the oracle cannot run this model: {error}") from error
