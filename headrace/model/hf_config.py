"""From a Hugging Face `config.json` to a ModelConfig.

Both spellings that are in use are read: the one that checkpoints are published with, and the one that
transformers writes when it saves a model again. A field that would change the maths in a way that is not
implemented here is an error; other unknown fields are ignored, as these files are full of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headrace.model.config import (
    ConfigError,
    DenseMLP,
    LayerConfig,
    ModelConfig,
    MoEMLP,
    Norm,
    Rope,
    RopeScaling,
)
from headrace.model.errors import CheckpointError

Fields = Mapping[str, Any]


def read_hugging_face_config(folder: Path) -> ModelConfig:
    """The config of a folder: `config.json`, and further end tokens from `generation_config.json`.

    Raises CheckpointError if the file is missing, unreadable, or describes a model that is not supported.
    """
    fields = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    more_ends = _read_json(generation).get("eos_token_id") if generation.exists() else None
    try:
        return parse_config(fields, more_ends)
    except (ConfigError, CheckpointError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def parse_config(fields: Fields, more_end_tokens: int | list[int] | None = None) -> ModelConfig:
    """The config that `fields` describe. Raises CheckpointError or ConfigError."""
    readers = {"cohere2_moe": _cohere2_moe, "llama": _llama}
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in readers:
        raise CheckpointError(
            f"model_type is {model_type!r}; supported are {' and '.join(readers)}: use such a checkpoint"
        )
    fields = _checked(fields)
    more = _checked({"eos_token_id": more_end_tokens})
    ends = (*_end_tokens(fields.get("eos_token_id")), *_end_tokens(more.get("eos_token_id")))
    return readers[model_type](fields, tuple(dict.fromkeys(ends)))


def _checked(fields: Fields) -> Fields:
    """The fields that are given: one that is null counts as absent.

    Raises CheckpointError for one that is not supported, or of the wrong kind: what uses it would fail far
    from here, if at all.
    """
    given = {field: value for field, value in fields.items() if value is not None}
    for field, accepted in _PLAIN.items():
        if field in given and given[field] not in accepted:
            raise CheckpointError(
                f"{field} is {given[field]!r}, which is not supported: only {accepted[0]!r} is"
            )
    for names, is_right, wanted in _KINDS:
        for field in names:
            if field in given and not is_right(given[field]):
                raise CheckpointError(f"{field} is {given[field]!r}: it must be {wanted}")
    return given


def _is_whole(value: object, *, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_tokens(value: object) -> bool:
    return all(_is_whole(token, least=0) for token in (value if isinstance(value, list) else [value]))


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


_KINDS: tuple[tuple[tuple[str, ...], Callable[[object], bool], str], ...] = (
    (
        (
            "vocab_size", "hidden_size", "intermediate_size", "prefix_dense_intermediate_size",
            "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "num_experts", "num_experts_per_tok", "max_position_embeddings", "sliding_window",
            "sliding_window_pattern", "prefix_dense_sliding_window_pattern",
        ),
        _is_whole,
        "a whole number from 1 up",
    ),
    (
        ("num_shared_experts", "first_k_dense_replace"),
        partial(_is_whole, least=0),
        "a whole number from 0 up",
    ),
    (
        (
            "rms_norm_eps", "layer_norm_eps", "logit_scale", "rope_theta",
            "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
        ),
        _is_positive,
        "a number above 0",
    ),
    (
        ("norm_topk_prob", "tie_word_embeddings"),
        lambda value: isinstance(value, bool),
        "true or false",
    ),
    (
        ("layer_types", "mlp_layer_types"),
        lambda value: isinstance(value, list) and all(isinstance(kind, str) for kind in value),
        "a list of names",
    ),
    (
        ("eos_token_id",),
        _are_tokens,
        "a token id or a list of them",
    ),
    (
        ("rope_parameters", "rope_scaling"),
        lambda value: isinstance(value, Mapping),
        "an object",
    ),
)  # fmt: skip

# Fields that would change the maths, and the values that do not.
_PLAIN: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "use_qk_norm": (False,),
    "use_parallel_block": (True,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0,),
}


def _cohere2_moe(fields: Fields, ends: tuple[int, ...]) -> ModelConfig:
    selection = fields.get("expert_selection_fn", "softmax")
    if selection != "sigmoid":
        raise CheckpointError(
            f"expert_selection_fn is {selection!r}, which is not supported: only 'sigmoid' is"
        )
    rms_eps = fields.get("rms_norm_eps")
    theta, scaling = _rope(fields)
    return ModelConfig(
        **_sizes(fields, head_dim=fields.get("head_dim", 128)),
        family="cohere2_moe",
        layers=_cohere2_layers(fields),
        parallel_block=True,
        norm=Norm.LAYER if rms_eps is None else Norm.RMS,
        norm_eps=fields.get("layer_norm_eps", 1e-5) if rms_eps is None else rms_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        tied_head=fields.get("tie_word_embeddings", True),
        logit_scale=fields.get("logit_scale", 0.0625),
        eos_token_ids=ends,
    )


def _cohere2_layers(fields: Fields) -> tuple[LayerConfig, ...]:
    layers = _need(fields, "num_hidden_layers")
    dense_first = fields.get("first_k_dense_replace", 0)
    prefix_pattern = fields.get("prefix_dense_sliding_window_pattern", 1)
    pattern = fields.get("sliding_window_pattern", 4)
    attention = fields.get("layer_types")
    if attention is None:
        counted = [(i, prefix_pattern) for i in range(dense_first)]
        counted += [(i, pattern) for i in range(layers - dense_first)]
        attention = ["sliding_attention" if (i + 1) % every else "full_attention" for i, every in counted]
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense" if i < dense_first else "sparse" for i in range(layers)]
    for field, values, known in (
        ("layer_types", attention, {"sliding_attention", "full_attention"}),
        ("mlp_layer_types", kinds, {"dense", "sparse"}),
    ):
        if len(values) != layers or not set(values) <= known:
            raise CheckpointError(f"{field} must name one of {sorted(known)} for each of the {layers} layers")
    sparse = _sparse(fields) if "sparse" in kinds else None
    dense = DenseMLP(width=_need(fields, "prefix_dense_intermediate_size")) if "dense" in kinds else None
    described = []
    for kind, mlp_kind in zip(attention, kinds, strict=True):
        window = _need(fields, "sliding_window") if kind == "sliding_attention" else None
        # Positions reach sliding layers, and dense layers if their own pattern is 1; no other full layer.
        sees_positions = window is not None or (mlp_kind == "dense" and prefix_pattern == 1)
        mlp = dense if mlp_kind == "dense" else sparse
        assert mlp is not None
        rope = Rope.INTERLEAVED if sees_positions else Rope.NONE
        described.append(LayerConfig(window=window, rope=rope, mlp=mlp))
    return tuple(described)


def _sparse(fields: Fields) -> MoEMLP:
    shared = fields.get("num_shared_experts", 0)
    strategy = fields.get("shared_expert_combination_strategy", "average")
    if shared and strategy not in ("average", "sum"):
        raise CheckpointError(
            f"shared_expert_combination_strategy is {strategy!r}: only average and sum exist"
        )
    return MoEMLP(
        width=_need(fields, "intermediate_size"),
        experts=_need(fields, "num_experts"),
        top_k=_need(fields, "num_experts_per_tok"),
        normalize=fields.get("norm_topk_prob", True),
        shared_experts=shared,
        shared_sum=strategy == "sum",
    )


def _llama(fields: Fields, ends: tuple[int, ...]) -> ModelConfig:
    if "sliding_window" in fields:
        raise CheckpointError(
            "sliding_window is set, which is not supported for llama: remove it if it is unused"
        )
    theta, scaling = _rope(fields)
    heads, hidden = _need(fields, "num_attention_heads"), _need(fields, "hidden_size")
    mlp = DenseMLP(width=_need(fields, "intermediate_size"))
    layer = LayerConfig(window=None, rope=Rope.HALF_SPLIT, mlp=mlp)
    return ModelConfig(
        **_sizes(fields, head_dim=fields.get("head_dim", hidden // heads)),
        family="llama",
        layers=(layer,) * _need(fields, "num_hidden_layers"),
        parallel_block=False,
        norm=Norm.RMS,
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_head=fields.get("tie_word_embeddings", False),
        eos_token_ids=ends,
    )


def _sizes(fields: Fields, *, head_dim: int) -> dict[str, Any]:
    heads = _need(fields, "num_attention_heads")
    return {
        "vocab_size": _need(fields, "vocab_size"),
        "hidden_size": _need(fields, "hidden_size"),
        "num_heads": heads,
        "num_kv_heads": fields.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "max_positions": _need(fields, "max_position_embeddings"),
    }


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """The base, and the scaling if there is one: from `rope_parameters`, or from the two older fields."""
    given = {**fields.get("rope_scaling", {}), **fields.get("rope_parameters", {})}
    if kinds := [field for field, value in given.items() if isinstance(value, Mapping)]:
        raise CheckpointError(
            f"rope_parameters differ by kind of layer ({', '.join(kinds)}), which is not supported: only one "
            "rotary embedding for all layers is"
        )
    rope = _checked(given)
    theta = float(rope.get("rope_theta", fields.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(
            f"rope_type is {kind!r}, which is not supported: only 'default' and 'llama3' are"
        )
    return theta, RopeScaling(
        factor=_need(rope, "factor"),
        low_freq_factor=_need(rope, "low_freq_factor"),
        high_freq_factor=_need(rope, "high_freq_factor"),
        original_max_position=_need(rope, "original_max_position_embeddings"),
    )


def _end_tokens(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _need(fields: Fields, field: str) -> Any:
    if fields.get(field) is None:
        raise CheckpointError(f"the field {field} is missing: the config is not complete")
    return fields[field]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist: give a folder that holds a whole checkpoint"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object: fetch it again")
    return content
