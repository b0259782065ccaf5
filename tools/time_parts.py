"""What the parts of a layer take on a GPU, each alone, and what share of the peak they reach:
`time_prefill --parts`.

Activations and experts are random numbers of a routed layer's shapes, and every expert has as many rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from headrace.kernel.prompt import passes
from headrace.kernel.prompt.passes import Passes
from headrace.model import tiled
from headrace.model.batch import Span
from headrace.model.config import KVGroup, ModelConfig, MoEMLP
from headrace.model.kv import BLOCK_TOKENS, blocks_for
from headrace.model.layers import group, route, spread, swiglu, weighed_sum
from headrace.model.varlen import attend_varlen, plan_varlen
from headrace.step.pack import PackedWeights

PEAK = 989e12  # operations a second in bfloat16: H200 datasheet, without sparsity
BANDWIDTH = 4.8e12  # bytes a second: H200 datasheet
ROUNDS = 8


class Part(NamedTuple):
    """Something to be timed: `work` does so many `operations`, or has to move so many bytes."""

    name: str
    work: Callable[[], object]
    operations: float = 0.0
    moved: float = 0.0


class Parts:
    """Those of the first layer with experts of a model, for a chunk of so many tokens."""

    def __init__(
        self, config: ModelConfig, weights: PackedWeights, tokens: int, device: torch.device | str = "cuda"
    ) -> None:
        self.config, self.weights, self.tokens = config, weights, tokens
        self.device = torch.device(device)
        mlps = [layer.mlp for layer in config.layers]
        self.layer = next(index for index, mlp in enumerate(mlps) if isinstance(mlp, MoEMLP))
        mlp = mlps[self.layer]
        assert isinstance(mlp, MoEMLP)
        self.mlp, self.slots = mlp, tokens * mlp.top_k
        self.fused = Passes() if passes.fits(config) and passes.available(self.device) else None
        self.hidden = self._random(tokens, config.hidden_size)
        self.rows = self._random(self.slots, config.hidden_size)
        self.gate_up = self._random(mlp.experts, 2 * mlp.width, config.hidden_size)

    def each(self) -> Iterator[Part]:
        """All of them; the memory of those that have been done is free again."""
        yield from self.products()
        yield from self.attention()
        yield from self.cudnn()
        yield from self.moves()

    def products(self) -> Iterator[Part]:
        """Dense ones, and those of the experts."""
        config, mlp = self.config, self.mlp
        product = 2.0 * config.hidden_size
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            matrix = self._random(heads * config.head_dim, config.hidden_size)
            operations = product * self.tokens * heads * config.head_dim
            yield Part(name, partial(functional.linear, self.hidden, matrix), operations)
        down, inner = (
            self._random(mlp.experts, config.hidden_size, mlp.width),
            self._random(self.slots, mlp.width),
        )
        ends = torch.arange(1, mlp.experts + 1, device=self.device, dtype=torch.int32)
        ends *= self.slots // mlp.experts
        yield Part(
            "experts up",
            lambda: functional.grouped_mm(self.rows, self.gate_up.transpose(1, 2), offs=ends),
            product * self.slots * 2 * mlp.width,
        )
        yield Part(
            "experts down",
            lambda: functional.grouped_mm(inner, down.transpose(1, 2), offs=ends),
            product * self.slots * mlp.width,
        )

    def attention(self) -> Iterator[Part]:
        """Of a chunk alone and behind a past, in full and in a window, by flash attention and by tiles."""
        config, tokens = self.config, self.tokens
        q, k, v = self._queries()
        window = config.window or tokens
        past = max(tokens, window)
        pages = self._random(
            blocks_for(past) + blocks_for(tokens), config.num_kv_heads, 2, BLOCK_TOKENS * config.head_dim
        )
        tables = dict.fromkeys(KVGroup, range(len(pages)))

        def attend(seen: int | None, tile: int | None, start: int = 0) -> Callable[[], object]:
            spans = [Span(range(tokens), start, tables)]
            plan = plan_varlen(spans, KVGroup.FULL, seen, self.device, tile)
            return lambda: attend_varlen(q, k, v, pages, plan, self.fused)

        pairs, left = tokens * (tokens + 1) / 2, max(tokens - window, 0)
        each = 4 * config.num_heads * config.head_dim  # operations of a pair of a token and what it sees
        for name, tile in (("flash", None), ("tiles", tiled.TILE)):
            yield Part(f"{name}, full", attend(None, tile), each * pairs)
            yield Part(f"{name}, window", attend(window, tile), each * (pairs - left * (left + 1) / 2))
            behind = f"past of {past}"
            yield Part(f"{name}, full, {behind}", attend(None, tile, past), each * (tokens * past + pairs))
            yield Part(f"{name}, window, {behind}", attend(window, tile, past), each * tokens * window)

    def cudnn(self) -> Iterator[Part]:
        """Attention of single shapes by cuDNN."""
        q, k, v = self._queries()
        each, half = 4 * self.config.num_heads * self.config.head_dim, self.tokens // 2

        def attend(queries: int, keys: int, *, causal: bool, count: int = 1) -> Callable[[], object]:
            given = q[: count * queries], k[: count * keys], v[: count * keys]
            return lambda: tiled.cudnn(*given, causal=causal, joined=True, count=count)

        square = each * half * half / 2
        yield Part("cudnn, causal, half", attend(half, half, causal=True), square)
        yield Part("cudnn, causal, half less 1", attend(half - 1, half - 1, causal=True), square)
        yield Part("cudnn, causal, two halves", attend(half, half, causal=True, count=2), 2 * square)
        yield Part(
            "cudnn, rectangle",
            attend(self.tokens, self.tokens, causal=False),
            each * self.tokens * self.tokens,
        )

    def moves(self) -> Iterator[Part]:
        """What computes little: the choice of experts, and rows on their way to them and back."""
        mlp, fused, hidden, rows = self.mlp, self.fused, self.hidden, self.rows
        scores = torch.randn(self.tokens, mlp.experts, device=self.device)
        ids, _ = route(scores, mlp, fused)
        grouped = group if fused is None else fused.group
        places, _ = grouped(ids, mlp.experts)
        shares, up = torch.rand(ids.shape, device=self.device), self._random(self.slots, 2 * mlp.width)
        yield Part("experts chosen", lambda: route(scores, mlp, fused), moved=scores.nbytes)
        yield Part("slots placed", lambda: grouped(ids, mlp.experts), moved=2.0 * ids.nbytes)
        spreads = spread if fused is None else fused.spread
        yield Part("rows spread", lambda: spreads(hidden, places), moved=hidden.nbytes + rows.nbytes)
        gated = swiglu if fused is None else fused.swiglu
        yield Part("silu times up", lambda: gated(up), moved=1.5 * up.nbytes)
        combined = weighed_sum if fused is None else fused.combine
        yield Part("rows combined", lambda: combined(rows, places, shares), moved=hidden.nbytes + rows.nbytes)
        matrix = f"blocks.{self.layer}.mlp.experts.gate_up"
        yield Part(
            "unpacking up", lambda: self.weights.unpack(matrix, self.gate_up), moved=2.0 * self.gate_up.nbytes
        )

    def first_of_a_shape(self) -> float:
        """Milliseconds of a call of cuDNN for which it has no plan yet."""
        q, k, v = self._queries()
        count = self.tokens // 2 - 3
        begun = time.monotonic()
        tiled.cudnn(q[:count], k[:count], v[:count], causal=True, joined=True)
        torch.cuda.synchronize()
        return 1e3 * (time.monotonic() - begun)

    def _queries(self) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = (self._random(self.tokens, count, config.head_dim) for count in heads)
        return q, k, v

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)


def report(config: ModelConfig, weights: PackedWeights, tokens: int) -> None:
    """Time all parts on the current GPU, and print what they take."""
    parts = Parts(config, weights, tokens)
    for part in parts.each():
        show(part)
    print(f"cudnn, the first of a shape: {parts.first_of_a_shape():.0f} ms")


def show(part: Part) -> None:
    """Print the time of some work, and its share of what the GPU can do; or why it cannot be done."""
    try:
        seconds = timed(part.work)
    except RuntimeError as error:
        print(f"{part.name}: {error}")
    else:
        print(told(part, seconds), flush=True)


def timed(work: Callable[[], object]) -> float:
    """Seconds of some work on the GPU: the median of five.

    ROUNDS of it follow one another, so that the host's part of the time hides behind the GPU's.
    """
    work()
    times: list[float] = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(ROUNDS):
            work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / ROUNDS)
    return statistics.median(times)


def told(part: Part, seconds: float) -> str:
    """The line for a part that took so long."""
    if part.operations:
        rate, share = f"{part.operations / seconds / 1e12:.0f} TFLOP/s", part.operations / seconds / PEAK
    else:
        rate, share = f"{part.moved / seconds / 1e12:.2f} TB/s", part.moved / seconds / BANDWIDTH
    return f"{part.name}: {1e3 * seconds:.3f} ms, {rate}, {share:.0%} of the peak"
