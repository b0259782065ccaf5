"""From a model's config to the task lists of one step."""

from __future__ import annotations

import numpy as np

from headrace.model.config import ModelConfig
from headrace.step.balance import divide, evenly
from headrace.step.blocks import BlockPlanner
from headrace.step.builder import Builder, Ranges, Values, Wait, pages, tile_bytes
from headrace.step.isa import Buffer, Flag, Opcode, Round
from headrace.step.machine import Machine
from headrace.step.plan import Plan
from headrace.step.shared_memory import machine_for
from headrace.step.sizes import sizes_of
from headrace.step.weights import Kind, WeightMap, weight_map


def build_plan(config: ModelConfig, *, rows: int, sms: int, machine: Machine | None = None) -> Plan:
    """The plan of one decode step of up to `rows` rows on `sms` SMs.

    Raises PlanError for a model that has none.
    """
    sizes = sizes_of(config, rows, sms)
    owned = Ranges.of(evenly(sizes.residual_tiles, sms))
    machine = machine or machine_for(sizes, int(owned.count.max()))
    weights = weight_map(config)
    builder = Builder(sizes, machine)
    commit = Wait(builder.counter("commit"), sms)
    x = _embed(builder, weights, owned)
    blocks = BlockPlanner(builder, config, weights, owned, commit)
    for layer in range(config.num_layers):
        x = blocks.plan(layer, x)
    vocabulary = _head(builder, weights, x, tied=config.tied_head)
    _sample(builder, vocabulary, commit)
    return Plan(
        config=config,
        sizes=sizes,
        weights=weights,
        descriptors=builder.descriptors(),
        counters=tuple(builder.counters),
        machine=machine,
    )


def _embed(builder: Builder, weights: WeightMap, owned: Ranges) -> Wait:
    matrix = weights.get(Kind.EMBEDDING)
    x = Wait(builder.counter("embed"), builder.sizes.residual_tiles)
    builder.tiled(
        Opcode.EMBED,
        owned,
        **pages(matrix),
        weights=matrix.offset,
        output=Buffer.X,
        signal_counter=x.counter,
    )
    return x


def _head(builder: Builder, weights: WeightMap, x: Wait, *, tied: bool) -> Ranges:
    matrix = weights.get(Kind.EMBEDDING if tied else Kind.HEAD)
    unlimited = np.full(builder.sizes.sms, matrix.tiles, dtype=np.int64)
    counts = divide(matrix.tiles, tile_bytes(matrix), builder.loads, unlimited)
    ranges = Ranges.of(counts)
    builder.gemm(
        Opcode.LM_HEAD,
        ranges,
        matrix,
        norm=builder.sizes.norms - 1,
        input=Buffer.X,
        output=Buffer.LOGITS,
        wait=x,
    )
    return ranges


def _sample(builder: Builder, vocabulary: Ranges, commit: Wait) -> None:
    """Every SM samples from its own logits. SM i has share i, and tiles ascend with it."""
    sms = builder.sizes.sms
    share = np.arange(sms, dtype=np.int64)
    writer = np.where(share == 0, int(Flag.WRITER), 0).astype(np.int64)
    parts: Values = {"share": share, "shares": sms, "signal_amount": 1}
    own: Values = {"first_tile": vocabulary.first, "tile_count": vocabulary.count, "input": Buffer.LOGITS}
    stats = done = Wait(builder.counter("stats"), sms)
    builder.add(Opcode.SAMPLE_STATS, None, output=Buffer.STATS, signal_counter=stats.counter, **own, **parts)
    for number in Round:
        ties = number in (Round.TOP_K_TIES, Round.TOP_P_TIES)
        before, done = done, Wait(builder.counter(f"select[{number.value}]"), sms)
        builder.add(
            Opcode.SAMPLE_SELECT,
            None,
            round=number,
            output=Buffer.TIES if ties else Buffer.HISTOGRAM,
            wait=before,
            signal_counter=done.counter,
            **own,
            **parts,
        )
    pick = Wait(builder.counter("pick"), sms)
    builder.add(
        Opcode.SAMPLE_PICK,
        None,
        output=Buffer.CANDIDATES,
        wait=done,
        second=stats,
        signal_counter=pick.counter,
        flags=writer,
        **own,
        **parts,
    )
    builder.add(
        Opcode.SAMPLE_COMMIT,
        None,
        input=Buffer.CANDIDATES,
        output=Buffer.ROW_STATE,
        wait=pick,
        signal_counter=commit.counter,
        flags=writer,
        **parts,
    )
