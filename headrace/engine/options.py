"""What a user may set about an engine, checked here and nowhere else.

Imports nothing heavy: the command line reads its defaults from here before it decides to load a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DECODE_BACKENDS = ("auto", "kernel", "torch", "oracle")

# Tokens of prompts in one step. A GPU reads all experts whatever it does: many tokens share the reading. For
# 32,768 tokens an H200 takes 849 ms in chunks of 8,192, 761 in two of 16,384, and 725 in one.
# A pass of so many needs 2 GiB more, which the KV cache of an H100 of 80 would miss: with less memory than
# LARGE_GPU chunks have half the size.
GPU_CHUNK = 16384
SMALL_GPU_CHUNK = 8192
LARGE_GPU = 100 * 2**30
CPU_CHUNK = 512

# Whole numbers, and the least of each: a prompt and an answer need two tokens.
_LEAST = {
    "max_sequences": 1,
    "max_context": 2,
    "prefill_chunk": 1,
    "kv_memory": 1,
    "queue": 1,
    "steps": 1,
    "unpacked_layers": 0,
}


class OptionError(ValueError):
    """An engine option that cannot work; `option` names it, the message says what to do."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine is sized.

    max_sequences   sequences that run at the same time; further ones wait
    max_context     tokens of prompt and answer together; None: what the model and the pool allow
    prefill_chunk   prompt tokens that one step takes in at most; None: GPU_CHUNK or SMALL_GPU_CHUNK on a GPU,
                    by its memory, else CPU_CHUNK; fewer where these would take long, and beside running
                    answers (`engine.pace`)
    max_decode_gap  milliseconds that a prompt may keep running answers waiting for their next token: chunks
                    are made smaller to fit, and their layers run in several steps (`engine.pace`)
    prefix_cache    keep the KV of past requests for those that begin in the same way
    kv_memory       bytes of the KV pool; None: as much as is free, but not more than could be used
    queue           requests that may wait
    steps           decode steps that one call of the backend may take
    decode          which backend decodes: one of DECODE_BACKENDS; auto is the kernel where it can, else torch
    unpacked_layers layers whose matrices stay unpacked for prompts, beside the kernel's packed weights:
                    prompts take less time, and the KV pool has less memory; None: as many as the GPU has
                    room for (`engine.unpacked.fitting_layers`)

    Raises OptionError for a value that no model could be run with.
    """

    max_sequences: int = 16
    max_context: int | None = None
    prefill_chunk: int | None = None
    max_decode_gap: float = 40.0
    prefix_cache: bool = True
    kv_memory: int | None = None
    queue: int = 256
    steps: int = 16
    decode: str = "auto"
    unpacked_layers: int | None = None

    def on_gpu(self, memory: int) -> EngineOptions:
        """These options with what holds on a GPU of so many bytes where nothing was said."""
        if self.prefill_chunk is not None:
            return self
        return replace(self, prefill_chunk=GPU_CHUNK if memory >= LARGE_GPU else SMALL_GPU_CHUNK)

    @property
    def chunk(self) -> int:
        """`prefill_chunk`, or what it is on a CPU."""
        return CPU_CHUNK if self.prefill_chunk is None else self.prefill_chunk

    def __post_init__(self) -> None:
        for option, least in _LEAST.items():
            value, may_be_none = getattr(self, option), getattr(EngineOptions, option) is None
            if not (value is None and may_be_none) and not (isinstance(value, int) and value >= least):
                raise OptionError(option, f"is {value!r}; give a whole number from {least} up")
        if not self.max_decode_gap > 0:
            raise OptionError("max_decode_gap", f"is {self.max_decode_gap}; give milliseconds above 0")
        if self.decode not in DECODE_BACKENDS:
            known = ", ".join(DECODE_BACKENDS)
            raise OptionError("decode", f"{self.decode!r} is not a backend; choose one of: {known}")
