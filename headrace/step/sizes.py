"""The sizes that a plan is for: what an interpreter or a kernel must know besides the descriptors."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.model.config import ModelConfig, MoEMLP, Norm, RopeScaling
from headrace.model.kv import BLOCK_TOKENS
from headrace.step.errors import PlanError
from headrace.step.isa import ELEMENT_BYTES, K_BLOCK, PAGE_BYTES_MAX, ROW_CAPACITIES, TILE_ROWS


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one model, for `rows` rows on `sms` SMs.

    `experts`, `top_k` and the widths are the largest of any layer; descriptors have each layer's own.
    """

    rows: int
    sms: int
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    hidden_tiles: int  # tiles of HIDDEN: the most active experts times tiles of an expert, or a dense layer's
    shared_tiles: int  # tiles of SHARED_HIDDEN
    norms: int
    norm: Norm
    norm_eps: float
    logit_scale: float
    rope_theta: float
    rope_scaling: RopeScaling | None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def head_tiles(self) -> int:
        """Tiles of one head."""
        return self.head_dim // TILE_ROWS

    @property
    def qkv_tiles(self) -> int:
        """Tiles that belong to one KV head: its queries, its key, its value."""
        return (self.group + 2) * self.head_tiles

    @property
    def residual_tiles(self) -> int:
        return self.hidden // TILE_ROWS

    @property
    def attention_tiles(self) -> int:
        return self.heads * self.head_tiles

    @property
    def router_tiles(self) -> int:
        return tiles(self.experts)

    @property
    def vocabulary_tiles(self) -> int:
        return tiles(self.vocabulary)

    @property
    def partial_floats(self) -> int:
        """float32 words of one record of PARTIALS: outputs, maxima, sums, rounded up to 16 bytes."""
        return -(-self.group * (self.head_dim + 2) // 4) * 4


def tiles(outputs: int) -> int:
    """Tiles of TILE_ROWS that hold `outputs` rows; the last may be padded."""
    return -(-outputs // TILE_ROWS)


def sizes_of(config: ModelConfig, rows: int, sms: int) -> Sizes:
    """Raises PlanError, naming the field, for a model whose sizes do not fit tiles and pages."""
    if rows not in ROW_CAPACITIES:
        raise PlanError(f"rows is {rows}: a plan is for one of {', '.join(map(str, ROW_CAPACITIES))} rows")
    if sms < 1:
        raise PlanError(f"sms is {sms}: a plan needs at least 1")
    mlps = [layer.mlp for layer in config.layers]
    check_model(config)
    routed = [mlp for mlp in mlps if isinstance(mlp, MoEMLP)]
    hidden_tiles = [
        tiles(mlp.width) * (min(mlp.experts, rows * mlp.top_k) if isinstance(mlp, MoEMLP) else 1)
        for mlp in mlps
    ]
    return Sizes(
        rows=rows,
        sms=sms,
        layers=config.num_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        experts=max((mlp.experts for mlp in routed), default=0),
        top_k=max((mlp.top_k for mlp in routed), default=0),
        hidden_tiles=max(hidden_tiles),
        shared_tiles=max((tiles(mlp.shared_experts * mlp.width) for mlp in routed), default=0),
        norms=config.num_layers * (1 if config.parallel_block else 2) + 1,
        norm=config.norm,
        norm_eps=config.norm_eps,
        logit_scale=config.logit_scale,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
    )


def check_model(config: ModelConfig) -> None:
    """Raise PlanError for a model whose sizes do not fit tiles and pages."""
    widths = {layer.mlp.width for layer in config.layers}
    columns = {"hidden_size": {config.hidden_size}, "the feed-forward width": widths}
    columns["num_heads * head_dim"] = {config.num_heads * config.head_dim}
    for name, values in columns.items():
        for value in values:
            if value % K_BLOCK:
                raise PlanError(f"{name} is {value}: a plan needs a multiple of {K_BLOCK}")
    if config.head_dim % 16:
        raise PlanError(f"head_dim is {config.head_dim}: a plan needs a multiple of 16")
    page = BLOCK_TOKENS * config.head_dim * ELEMENT_BYTES
    if page > PAGE_BYTES_MAX:
        raise PlanError(
            f"head_dim is {config.head_dim}: {BLOCK_TOKENS} keys take {page} bytes, "
            f"and a page has {PAGE_BYTES_MAX}"
        )
