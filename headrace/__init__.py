"""A serving engine for North Mini Code on Hopper GPUs, built around a decode megakernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.model.sampling import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    # LLM brings torch and transformers along, which take seconds that `headrace --help` need not.
    if name == "LLM":
        from headrace.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
