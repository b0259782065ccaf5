"""The tasks of one layer, for parallel and for sequential blocks.

The order within a layer is the measured one: what the next wait hangs on goes first, and work that hangs on
nothing new (EXPERT_UP) fills the wait for attention's partial results.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import numpy as np

from headrace.model.config import DenseMLP, ModelConfig, MoEMLP, Rope
from headrace.model.kv import BLOCK_TOKENS
from headrace.step.balance import Ints, divide, evenly
from headrace.step.builder import Builder, Ranges, Wait, tile_bytes
from headrace.step.division import attention_items, chunks_of, share_of
from headrace.step.isa import ELEMENT_BYTES, Buffer, Flag, Opcode, Pairing
from headrace.step.limit import distinct_experts
from headrace.step.machine import MERGED_TILES
from headrace.step.weights import Kind, WeightMap

# From so many rows on the router follows queries, keys and values: attention, which waits for these, is
# long enough by then for experts to be chosen meanwhile.
LATE_ROUTER_ROWS = 8
NOMINAL_CONTEXT = 8192  # the row lengths that attention's shares are levelled out for

_PAIRINGS = {
    Rope.NONE: Pairing.NONE,
    Rope.INTERLEAVED: Pairing.INTERLEAVED,
    Rope.HALF_SPLIT: Pairing.HALF_SPLIT,
}


class BlockPlanner:
    """Plans layers in order. `owned` are the residual tiles of every SM, `commit` the end of a step."""

    def __init__(
        self, builder: Builder, config: ModelConfig, weights: WeightMap, owned: Ranges, commit: Wait
    ) -> None:
        self.builder = builder
        self.sizes = builder.sizes
        self.config = config
        self.weights = weights
        self.owned = owned
        self.commit = commit
        self._none: Ints = np.zeros(self.sizes.sms, dtype=np.int64)
        self.page_bytes = BLOCK_TOKENS * config.head_dim * ELEMENT_BYTES
        self._attention_bytes = lru_cache(maxsize=None)(self._nominal_attention)

    def plan(self, layer: int, x: Wait) -> Wait:
        """The tasks of a layer that reads X after the wait `x`; gives the wait for the next layer's X."""
        return self._parallel(layer, x) if self.config.parallel_block else self._sequential(layer, x)

    def _parallel(self, layer: int, x: Wait) -> Wait:
        mlp = self.config.layers[layer].mlp
        routing, routers = Wait(), self._none
        if not isinstance(mlp, DenseMLP):
            routers = self._router_tiles(layer)
        late = self.sizes.rows >= LATE_ROUTER_ROWS
        if routers.any() and not late:
            routing = self._router(layer, x, layer, routers)
        qkv = self._qkv(layer, x, layer, routers)
        if routers.any() and late:
            routing = self._router(layer, x, layer, routers)
        partials = self._attention(layer, qkv)
        if isinstance(mlp, DenseMLP):
            up = self._ffn_up(layer, x, layer, Kind.FFN_UP, Buffer.HIDDEN)
        else:
            up = self._expert_up(layer, x, layer, mlp, routing)
        shared = self._shared_up(layer, x, layer)
        merged = self._merge(layer, partials)
        self._down(Opcode.O_PROJ, Kind.O, layer, Buffer.ATTENTION_OUT, merged)
        return self._feed_forward_down(layer, mlp, up, shared, routing)

    def _sequential(self, layer: int, x: Wait) -> Wait:
        mlp = self.config.layers[layer].mlp
        partials = self._attention(layer, self._qkv(layer, x, 2 * layer, self._none))
        merged = self._merge(layer, partials)
        y = Wait(self.builder.counter(f"o[{layer}]"), self.sizes.residual_tiles)
        self._down(Opcode.O_PROJ, Kind.O, layer, Buffer.ATTENTION_OUT, merged, y)
        norm = 2 * layer + 1
        if isinstance(mlp, DenseMLP):
            up = self._ffn_up(layer, y, norm, Kind.FFN_UP, Buffer.HIDDEN)
            return self._feed_forward_down(layer, mlp, up, None, Wait())
        routing = self._router(layer, y, norm, self._router_tiles(layer))
        up = self._expert_up(layer, y, norm, mlp, routing)
        return self._feed_forward_down(layer, mlp, up, self._shared_up(layer, y, norm), routing)

    def _router_tiles(self, layer: int) -> Ints:
        """Tiles of the router for every SM: where the loads are smallest, and as many beside each KV head."""
        matrix = self.weights.get(Kind.ROUTER, layer)
        return self._balanced(matrix.tiles, tile_bytes(matrix), self._none, self._head_groups(matrix.tiles))

    def _router(self, layer: int, x: Wait, norm: int, counts: Ints) -> Wait:
        matrix = self.weights.get(Kind.ROUTER, layer)
        routing = Wait(self.builder.counter(f"router[{layer}]"), matrix.tiles)
        self.builder.gemm(
            Opcode.ROUTER,
            Ranges.of(counts),
            matrix,
            layer=layer,
            experts=matrix.outputs,
            norm=norm,
            input=Buffer.X,
            output=Buffer.ROUTER_LOGITS,
            wait=x,
            signal_counter=routing.counter,
        )
        return routing

    def _qkv(self, layer: int, x: Wait, norm: int, routers: Ints) -> Wait:
        """Gives the first of the counters, one for each KV head. `routers` are tiles that SMs have besides.

        Where KV heads share the SMs out evenly no SM has tiles of two: those would be two tasks.
        """
        matrix = self.weights.get(Kind.QKV, layer)
        rope = _PAIRINGS[self.config.layers[layer].rope]
        unit = 2 if rope is Pairing.HALF_SPLIT else 1
        taken = -(-routers // unit)
        groups = self._head_groups(matrix.tiles // unit)
        counts = self._balanced(matrix.tiles // unit, tile_bytes(matrix) * unit, taken, groups) * unit
        ranges, head = Ranges.of(counts), self.sizes.qkv_tiles
        counters = [
            self.builder.counter(f"qkv[{layer}][{kv_head}]") for kv_head in range(self.sizes.kv_heads)
        ]
        for kv_head, counter in enumerate(counters):
            self.builder.gemm(
                Opcode.QKV_PROJ,
                ranges.within(kv_head * head, (kv_head + 1) * head),
                matrix,
                layer=layer,
                kv_head=kv_head,
                window=self.config.layers[layer].window or 0,
                rope=rope,
                norm=norm,
                input=Buffer.X,
                output=Buffer.QKV,
                wait=x,
                signal_counter=counter,
            )
        return Wait(counters[0], head)

    def _attention(self, layer: int, qkv: Wait) -> Wait:
        window = self.config.layers[layer].window or 0
        done = Wait(self.builder.counter(f"attention[{layer}]"), self.sizes.sms)
        self.builder.add(
            Opcode.ATTENTION,
            None,
            layer=layer,
            share=self.builder.shares(self._attention_bytes(window)),
            shares=self.sizes.sms,
            page_bytes=self.page_bytes,
            window=window,
            input=Buffer.QKV,
            output=Buffer.PARTIALS,
            wait=qkv,
            wait_span=self.sizes.kv_heads,
            loader=self.commit,
            loader_lag=1,
            signal_counter=done.counter,
            signal_amount=1,
        )
        return done

    def _nominal_attention(self, window: int) -> Ints:
        """Bytes of every share when all rows have NOMINAL_CONTEXT tokens."""
        position = min(NOMINAL_CONTEXT, self.config.max_positions) - 1
        rows, sms, chunks = self.sizes.rows, self.sizes.sms, chunks_of(position, window)
        lengths = [
            sum(
                len(chunks.blocks(item.chunk))
                for item in attention_items([position] * rows, self.sizes.kv_heads, window, share, sms)
            )
            for share in range(sms)
        ]
        return np.array(lengths, dtype=np.int64) * 2 * self.page_bytes

    def _expert_up(self, layer: int, x: Wait, norm: int, mlp: MoEMLP, routing: Wait) -> Wait:
        matrix = self.weights.get(Kind.EXPERT_UP, layer)
        sms = self.sizes.sms
        items = self._experts(mlp) * matrix.tiles
        sizes = np.array([len(share_of(items, share, sms)) for share in range(sms)], dtype=np.int64)
        done = Wait(self.builder.counter(f"up[{layer}]"), sms)
        every = Ranges(np.zeros(sms, dtype=np.int64), np.full(sms, matrix.tiles, dtype=np.int64))
        self.builder.add(
            Opcode.EXPERT_UP,
            None,
            layer=layer,
            tile_count=every.count,
            k=matrix.k,
            pages_per_tile=matrix.pages_per_tile,
            page_bytes=matrix.page_bytes,
            weights=matrix.offset,
            expert_stride=matrix.stride,
            experts=mlp.experts,
            top_k=mlp.top_k,
            share=self.builder.shares(sizes * tile_bytes(matrix)),
            shares=sms,
            norm=norm,
            input=Buffer.X,
            output=Buffer.HIDDEN,
            wait=x,
            second=routing,
            loader=routing,
            signal_counter=done.counter,
            signal_amount=1,
        )
        return done

    def _ffn_up(self, layer: int, x: Wait, norm: int, kind: Kind, output: Buffer) -> Wait:
        matrix = self.weights.get(kind, layer)
        counts = self._balanced(matrix.tiles, tile_bytes(matrix), self._none)
        name = "shared_up" if kind is Kind.SHARED_UP else "up"
        done = Wait(self.builder.counter(f"{name}[{layer}]"), matrix.tiles)
        self.builder.gemm(
            Opcode.FFN_UP,
            Ranges.of(counts),
            matrix,
            layer=layer,
            norm=norm,
            input=Buffer.X,
            output=output,
            wait=x,
            signal_counter=done.counter,
        )
        return done

    def _shared_up(self, layer: int, x: Wait, norm: int) -> Wait | None:
        mlp = self.config.layers[layer].mlp
        if isinstance(mlp, DenseMLP) or not mlp.shared_experts:
            return None
        return self._ffn_up(layer, x, norm, Kind.SHARED_UP, Buffer.SHARED_HIDDEN)

    def _merge(self, layer: int, partials: Wait) -> Wait:
        tiles = self.sizes.attention_tiles
        # An SM with tiles of two heads would go through all rows twice.
        together = gcd(MERGED_TILES, self.sizes.head_tiles)
        merged = Wait(self.builder.counter(f"merge[{layer}]"), tiles)
        self.builder.tiled(
            Opcode.ATTENTION_MERGE,
            Ranges.of(evenly(tiles // together, self.sizes.sms) * together),
            layer=layer,
            window=self.config.layers[layer].window or 0,
            input=Buffer.PARTIALS,
            output=Buffer.ATTENTION_OUT,
            wait=partials,
            signal_counter=merged.counter,
        )
        return merged

    def _feed_forward_down(
        self, layer: int, mlp: DenseMLP | MoEMLP, up: Wait, shared: Wait | None, routing: Wait
    ) -> Wait:
        """The down projections of a layer, the last of which publishes X."""
        x = Wait(self.builder.counter(f"down[{layer}]"), self.sizes.residual_tiles)
        if isinstance(mlp, DenseMLP):
            self._down(Opcode.FFN_DOWN, Kind.FFN_DOWN, layer, Buffer.HIDDEN, up, x)
            return x
        half = Flag.HALVE if shared is not None and not mlp.shared_sum else Flag(0)
        if shared is not None:
            self._down(Opcode.FFN_DOWN, Kind.SHARED_DOWN, layer, Buffer.SHARED_HIDDEN, shared, flags=half)
        self._expert_down(layer, mlp, up, routing, half, x)
        return x

    def _expert_down(self, layer: int, mlp: MoEMLP, up: Wait, routing: Wait, half: Flag, x: Wait) -> None:
        matrix = self.weights.get(Kind.EXPERT_DOWN, layer)
        self.builder.gemm(
            Opcode.EXPERT_DOWN,
            self.owned,
            matrix,
            layer=layer,
            expert_stride=matrix.stride,
            experts=mlp.experts,
            top_k=mlp.top_k,
            flags=half | (Flag.NORMALIZE if mlp.normalize else Flag(0)),
            input=Buffer.HIDDEN,
            output=Buffer.X,
            wait=up,
            second=routing,
            loader=routing,
            signal_counter=x.counter,
        )
        self.builder.read(self.owned.count * tile_bytes(matrix) * self._experts(mlp))

    def _experts(self, mlp: MoEMLP) -> int:
        """How many experts a step is expected to read of a layer."""
        return round(distinct_experts(mlp.experts, mlp.top_k, self.sizes.rows))

    def _down(
        self,
        opcode: Opcode,
        kind: Kind,
        layer: int,
        source: Buffer,
        wait: Wait,
        publish: Wait | None = None,
        **flags: int,
    ) -> None:
        """A projection onto the residual tiles of their owners, which publishes X where `publish` says so."""
        matrix = self.weights.get(kind, layer)
        signal = {} if publish is None else {"signal_counter": publish.counter}
        self.builder.gemm(
            opcode,
            self.owned,
            matrix,
            layer=layer,
            input=source,
            output=Buffer.RESIDUAL if publish is None else Buffer.X,
            wait=wait,
            **signal,
            **flags,
        )
        self.builder.read(self.owned.count * tile_bytes(matrix))

    def _head_groups(self, total: int) -> int:
        """Groups of SMs, one for each KV head, that share `total` tiles out: 1 where that is uneven."""
        heads = self.sizes.kv_heads
        return 1 if self.sizes.sms % heads or total % heads else heads

    def _balanced(self, total: int, weight: int, taken: Ints, groups: int = 1) -> Ints:
        """Counts that level out the loads, no SM having more than an even share rounded up.

        Tiles that SMs have `taken` before the same wait are part of their share. `groups` of neighbouring SMs
        have the same number of tiles each.
        """
        counts = np.zeros_like(taken)
        for own in np.split(np.arange(self.sizes.sms), groups):
            share = -(-(total // groups + int(taken[own].sum())) // len(own))
            caps = np.maximum(share - taken[own], 0)
            while int(caps.sum()) < total // groups:  # where SMs have taken more than a share
                caps += 1
            counts[own] = divide(total // groups, weight, self.builder.loads[own], caps)
        self.builder.read(counts * weight)
        return counts
