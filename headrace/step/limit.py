"""What a decode step cannot do without reading, and so how fast it could be at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.model.config import ModelConfig, MoEMLP
from headrace.step.isa import ELEMENT_BYTES, Opcode
from headrace.step.weights import Kind, Matrix, weight_map

_ROUTED = (Kind.EXPERT_UP, Kind.EXPERT_DOWN)
_READ_BY = {
    Kind.EMBEDDING: Opcode.LM_HEAD,  # where it is the head
    Kind.HEAD: Opcode.LM_HEAD,
    Kind.QKV: Opcode.QKV_PROJ,
    Kind.O: Opcode.O_PROJ,
    Kind.ROUTER: Opcode.ROUTER,
    Kind.EXPERT_UP: Opcode.EXPERT_UP,
    Kind.EXPERT_DOWN: Opcode.EXPERT_DOWN,
    Kind.FFN_UP: Opcode.FFN_UP,
    Kind.FFN_DOWN: Opcode.FFN_DOWN,
    Kind.SHARED_UP: Opcode.FFN_UP,
    Kind.SHARED_DOWN: Opcode.FFN_DOWN,
}
_NORM_BYTES = 4  # of an element


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a step: weights that every step reads, those of the experts in use, and keys and values."""

    weights: float
    experts: float
    kv: float

    @property
    def total(self) -> float:
        return self.weights + self.experts + self.kv

    def share(self, seconds: float, bandwidth: float) -> float:
        """What part of `bandwidth`, in bytes a second, a step reaches that takes so long."""
        return self.total / bandwidth / seconds


def step_bytes(config: ModelConfig, positions: Sequence[float], experts: float) -> StepBytes:
    """What a step of rows at `positions` must read, each thing once.

    `experts` is how many distinct experts the rows use, summed over all layers with experts. Of keys and
    values what a row can see counts, its own excepted: that was just made. Activations do not count.
    Raises ValueError where layers differ in the size of their experts, so that a sum does not tell the bytes.
    """
    matrices = weight_map(config).matrices
    static = sum(_bytes(matrix) for (kind, _), matrix in matrices.items() if _is_static(kind, config))
    rows = len(positions) * config.hidden_size * ELEMENT_BYTES  # of the embedding
    norms = config.hidden_size * _NORM_BYTES * len(weight_map(config).norms)
    return StepBytes(static + rows + norms, experts * expert_bytes(config), kv_bytes(config, positions))


def bytes_by_operation(
    config: ModelConfig, positions: Sequence[float], experts: float
) -> dict[Opcode, float]:
    """The bytes of `step_bytes` by the operation that reads them, but for those of norms, which several read.

    Raises ValueError as `step_bytes` does.
    """
    expert_bytes(config)
    matrices = weight_map(config).matrices
    routed = sum(kind is Kind.EXPERT_UP for kind, _ in matrices)
    read = {
        Opcode.EMBED: float(len(positions) * config.hidden_size * ELEMENT_BYTES),
        Opcode.ATTENTION: kv_bytes(config, positions),
    }
    for (kind, _), matrix in matrices.items():
        if kind in _ROUTED or _is_static(kind, config):
            times = experts / routed if kind in _ROUTED else 1
            operation = _READ_BY[kind]
            read[operation] = read.get(operation, 0.0) + times * _bytes(matrix)
    return read


def expert_bytes(config: ModelConfig) -> int:
    """Of one expert; 0 for a model without. Raises ValueError if they are not all alike."""
    per_layer: dict[int, int] = {}
    for (kind, layer), matrix in weight_map(config).matrices.items():
        if kind in _ROUTED:
            per_layer[layer] = per_layer.get(layer, 0) + _bytes(matrix)
    sizes = set(per_layer.values())
    if len(sizes) > 1:
        raise ValueError(f"layers have experts of different sizes: {sorted(sizes)} bytes")
    return sizes.pop() if sizes else 0


def kv_bytes(config: ModelConfig, positions: Sequence[float]) -> float:
    """Of the keys and values before each position that its row can see, over all layers."""
    token = 2 * config.num_kv_heads * config.head_dim * ELEMENT_BYTES
    seen = 0.0
    for layer in config.layers:
        most = float("inf") if layer.window is None else layer.window - 1
        seen += sum(min(position, most) for position in positions)
    return seen * token


def uniform_experts(config: ModelConfig, rows: int) -> float:
    """How many distinct experts, over all layers, `rows` rows would use if all were equally likely."""
    return sum(
        distinct_experts(layer.mlp.experts, layer.mlp.top_k, rows)
        for layer in config.layers
        if isinstance(layer.mlp, MoEMLP)
    )


def distinct_experts(experts: int, top_k: int, rows: int) -> float:
    """How many of a layer's `experts` the `top_k` of each of `rows` rows are, on average, if all are equally
    likely."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def _is_static(kind: Kind, config: ModelConfig) -> bool:
    """A step reads the whole embedding only where it is the head."""
    return kind not in _ROUTED and (kind is not Kind.EMBEDDING or config.tied_head)


def _bytes(matrix: Matrix) -> int:
    """Of one expert's matrix where there are several."""
    return matrix.outputs * matrix.k * ELEMENT_BYTES
