"""Options that several commands have, each written once.

A command takes a group of options as one parameter, annotated with a dataclass below; `command` shows typer
the fields of the group in the parameter's place. Values are checked by what they are for, not here.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from headrace.cli.console import RefusedError, configure_logging, err, progress_bars, refuse
from headrace.engine.options import CPU_CHUNK, DECODE_BACKENDS, GPU_CHUNK, SMALL_GPU_CHUNK, EngineOptions
from headrace.model.sampling import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine
    from headrace.load import Loaded
    from headrace.model.config import ModelConfig

REFUSED = 2  # the exit code for what cannot be done, as for wrong usage

SAMPLING = {"temperature": 0.7, "top_p": 0.95}  # for models that do not say how they want to be sampled

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face folder, a .gguf file, or one of: smollm2, north-micro.",
        show_default=False,
    ),
]
Synthetic = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The shape of NAME (such as north-mini-code) with random weights, in place of a MODEL.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Which model, and where it runs."""

    model: Source = None
    synthetic: Synthetic = None
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where the model runs.")] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|bfloat16|float32",
            help="Precision of weights and KV; auto is bfloat16 on a GPU, float32 on a CPU.",
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="model|none",
            help="Sampling where nobody says otherwise: as generation_config.json asks, or plain.",
        ),
    ] = "model"

    weights_cache: Annotated[
        str,
        typer.Option(
            metavar="auto|none|FOLDER",
            help="Where weights packed for the decode kernel are kept for the next start, as large as the "
            "model; auto is ~/.cache/headrace/weights.",
        ),
    ] = "auto"

    def load(self, options: EngineOptions) -> Loaded:
        """The model for an engine with `options`, with progress bars while it loads."""
        from headrace.load import load

        with progress_bars() as bars:
            return load(
                self.model,
                synthetic=self.synthetic,
                device=self.device,
                dtype=self.dtype,
                options=options,
                generation_config=self.generation_config,
                weights_cache=self.weights_cache,
                progress=bars,
            )


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """How the engine is sized."""

    max_context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and answer together. Default: what the model and the memory allow.",
            show_default=False,
        ),
    ] = None
    max_sequences: Annotated[int, typer.Option(help="Sequences that run at the same time.")] = (
        EngineOptions.max_sequences
    )
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            help="Most prompt tokens that a step takes in; fewer where that would take long, and beside "
            f"running answers. Default: {GPU_CHUNK} on a GPU of 100 GiB, {SMALL_GPU_CHUNK} on others, "
            f"else {CPU_CHUNK}.",
            show_default=False,
        ),
    ] = EngineOptions.prefill_chunk
    max_decode_gap: Annotated[
        float,
        typer.Option(
            metavar="MS", help="How long a prompt may keep running answers waiting for their next token."
        ),
    ] = EngineOptions.max_decode_gap
    prefix_cache: Annotated[
        bool, typer.Option(help="Keep the KV of past requests for those that begin in the same way.")
    ] = EngineOptions.prefix_cache
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the KV cache, such as 512M or 8G. Default: what is free and useful.",
            show_default=False,
        ),
    ] = None
    queue: Annotated[int, typer.Option(help="Requests that may wait; more are told to come back.")] = (
        EngineOptions.queue
    )
    decode: Annotated[
        str, typer.Option(metavar="BACKEND", help=f"What decodes: {', '.join(DECODE_BACKENDS)}.")
    ] = EngineOptions.decode
    unpacked_layers: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help="Layers whose weights stay unpacked for prompts, beside those packed for the decode kernel: "
            "prompts take less time, and the KV cache has less memory. auto takes half of that at most, "
            "where enough is left for long contexts; 0: none.",
        ),
    ] = "auto"

    def options(self) -> EngineOptions:
        """Raises OptionError for what cannot work."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        parsed = {
            "kv_memory": parse_size(self.kv_memory),
            "unpacked_layers": parse_layers(self.unpacked_layers),
        }
        return EngineOptions(**values | parsed)

    def build(self, loaded: Loaded, options: EngineOptions, *, rehearse: bool = False) -> AsyncEngine:
        """An engine over the model, running. `rehearse`: the first prompts take no longer than later ones."""
        from headrace.engine.async_engine import AsyncEngine
        from headrace.engine.build import build_engine

        core = build_engine(
            loaded.model,
            loaded.tokenizer,
            options,
            weights=loaded.weights,
            unpacked=loaded.unpacked,
            say=err.print,
        )
        engine = AsyncEngine(core)
        engine.start(rehearse=rehearse)
        return engine


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How answers are sampled."""

    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 always takes the most likely token. Default: the model's own, else 0.7.",
            show_default=False,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the likeliest tokens of this much in all. Default: the model's own, else 0.95.",
            show_default=False,
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest answer. Default: what is left of the context.", show_default=False),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Draw the same answer every time.", show_default=False)] = (
        None
    )

    def params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """What was given over what the model asks for, or over our own defaults if it asks for nothing.

        Raises ParameterError for a value out of range.
        """
        return SamplingParams(**self.over(defaults))

    def over(self, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
        """As `params`, under the names that SamplingParams and the HTTP endpoint share."""
        return dict(defaults or SAMPLING) | self.values()

    def values(self) -> dict[str, Any]:
        """What was given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if value is not None}


def config_of(model: str | None, synthetic: str | None) -> ModelConfig:
    """The configuration of the model that is meant; no weights are read.

    Raises RefusedError if none is named, or two.
    """
    from headrace.load import resolve
    from headrace.model.checkpoint import read_config
    from headrace.model.presets import PRESETS
    from headrace.model.synthetic import preset

    if synthetic is not None and model is None:
        return preset(synthetic)
    if model is None or synthetic is not None:
        raise RefusedError(f"give either a MODEL or --synthetic with one of: {', '.join(PRESETS)}")
    return read_config(resolve(model))


def parse_size(text: str | None) -> int | None:
    """Bytes that a size such as 512M or 8GiB means; units are powers of 1024. Raises RefusedError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise RefusedError(f"--kv-memory {text!r} is not a size: write it like 512M or 8G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_layers(text: str) -> int | None:
    """The number that --unpacked-layers says, None for auto. Raises RefusedError."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        message = f"--unpacked-layers {text!r} is not a number: write auto, or one like 24"
        raise RefusedError(message) from None


def command(app: typer.Typer) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command of `app`: groups of options unfolded, refusals said in one sentence."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        groups = {
            name: kind
            for name, kind in get_type_hints(function).items()
            if isinstance(kind, type) and is_dataclass(kind)
        }

        @functools.wraps(function)
        def run(**values: Any) -> None:
            configure_logging()
            try:
                for name, group in groups.items():
                    values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
                function(**values)
            except _refusals() as error:
                refuse(_as_options(error))
                raise typer.Exit(REFUSED) from error

        parameters = list(_unfolded(function, groups))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command()(run)
        return function

    return register


def _unfolded(function: Callable[..., None], groups: dict[str, type]) -> Any:
    """The parameters of `function`, with the fields of a group in the place of the group."""
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.name not in groups:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        hints = get_type_hints(groups[parameter.name], include_extras=True)
        for field in fields(groups[parameter.name]):
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )


def _as_options(error: Exception) -> str:
    """An error's message, in which what was given is called what it is called on the command line."""
    name = getattr(error, "option", getattr(error, "parameter", None))
    if not isinstance(name, str):
        return str(error)
    return f"--{name.replace('_', '-')} {str(error).removeprefix(f'{name}: ')}"


def _refusals() -> tuple[type[Exception], ...]:
    """The errors whose message is made for users.

    Only what is already imported can have been raised, and importing the rest takes seconds: so an error's
    class is looked for where it would be, and left out if that module has not been loaded.
    """
    import sys

    places = {
        "headrace.bench.compare": ("ResultsError",),
        "headrace.bench.decode": ("BenchError",),
        "headrace.bench.points": ("PointError",),
        "headrace.cli.console": ("RefusedError",),
        "headrace.client": ("ServerError",),
        "headrace.engine.options": ("OptionError",),
        "headrace.engine.request": ("EngineError",),
        "headrace.kernel.build": ("BuildError",),
        "headrace.kernel.device": ("DeviceError",),
        "headrace.kernel.launcher": ("WatchdogError",),
        "headrace.kernel.trace": ("TraceError",),
        "headrace.kernel.variant": ("VariantError",),
        "headrace.llm": ("GenerationError",),
        "headrace.load": ("SourceError",),
        "headrace.model.config": ("ConfigError",),
        "headrace.model.errors": ("CheckpointError",),
        "headrace.model.sampling": ("ParameterError",),
        "headrace.model.tokenizer": ("ChatTemplateError", "TextError", "TokenizerError"),
        "headrace.server.app": ("AddressError",),
        "headrace.step.errors": ("PlanError",),
    }
    loaded = ((sys.modules.get(module), names) for module, names in places.items())
    return tuple(getattr(module, name) for module, names in loaded if module for name in names)
