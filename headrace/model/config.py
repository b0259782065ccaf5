"""What a model is: its sizes, and for every layer how it attends and which feed-forward it has.

One description serves both families. Nothing below the checkpoint reader looks at a family's name to decide
about maths: it reads the fields of `ModelConfig` and `LayerConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ConfigError(ValueError):
    """A configuration that no model of ours can have; the message names the field and says what to do."""


class Norm(StrEnum):
    """The two normalisations in use.

    RMS divides by the root mean square. LAYER subtracts the mean first and has no bias (Cohere's older form).
    """

    RMS = "rms"
    LAYER = "layer"


class Rope(StrEnum):
    """How rotary position embedding pairs the elements of a head, or NONE where a layer sees no positions."""

    NONE = "none"
    INTERLEAVED = "interleaved"  # pairs (2i, 2i + 1): Cohere
    HALF_SPLIT = "half_split"  # pairs (i, i + head_dim / 2): Llama


class KVGroup(StrEnum):
    """Layers that share one block table: those that see the whole past, and those that see a window of it."""

    FULL = "full"
    SLIDING = "sliding"


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the rotary frequencies (Llama 3.1 model card and `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True)
class DenseMLP:
    """A gated feed-forward: down(silu(gate(h)) * up(h)), `width` wide."""

    width: int


@dataclass(frozen=True, kw_only=True)
class MoEMLP:
    """A routed feed-forward of `experts` gated experts, `width` wide, of which a token uses `top_k`.

    The router takes the `top_k` largest raw logits (ties: lowest index) and weighs each by its sigmoid.
    `normalize` divides the weights by their sum. Shared experts see every token and, as in transformers,
    are averaged with the routed ones: (routed + shared) / 2, unless `shared_sum` adds them.
    """

    width: int
    experts: int
    top_k: int
    normalize: bool = False
    shared_experts: int = 0
    shared_sum: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One transformer block. `window` counts the token itself; None means that all of the past is seen."""

    window: int | None
    rope: Rope
    mlp: DenseMLP | MoEMLP

    @property
    def group(self) -> KVGroup:
        return KVGroup.FULL if self.window is None else KVGroup.SLIDING


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything about a model but its weights.

    `parallel_block` says whether attention and feed-forward read the same normalised input and are added
    together (Cohere), or follow each other with a norm each (Llama).
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    parallel_block: bool
    norm: Norm
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    max_positions: int
    tied_head: bool
    logit_scale: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot be shared evenly by {self.num_kv_heads} KV heads: "
                "num_attention_heads must be a multiple of num_key_value_heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embedding needs an even head_dim")
        if not self.layers:
            raise ConfigError("the model has no layers: num_hidden_layers must be at least 1")
        if len({layer.window for layer in self.layers if layer.window is not None}) > 1:
            raise ConfigError("sliding layers with different windows in one model are not supported")
        for layer in self.layers:
            mlp = layer.mlp
            if isinstance(mlp, MoEMLP) and not 1 <= mlp.top_k <= mlp.experts:
                raise ConfigError(f"top_k is {mlp.top_k}, outside 1..{mlp.experts} (the number of experts)")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def window(self) -> int | None:
        """The window of the sliding layers, or None for a model without any."""
        return next((layer.window for layer in self.layers if layer.window is not None), None)

    def layers_in(self, group: KVGroup) -> tuple[int, ...]:
        """The indices of the layers whose KV lives in `group`."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.group is group)
