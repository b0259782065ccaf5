"""Is every output made exactly once, and by an SM that may make it?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.model.config import DenseMLP
from headrace.step.checker.faults import Check, Fault
from headrace.step.checker.table import Group, Table
from headrace.step.isa import DYNAMIC, SAMPLING, USED, Buffer, Field, Flag, Opcode, Pairing, Round
from headrace.step.weights import Kind

# Operations on residual tiles: these stay with their owner for the whole step.
_OWNED = (Opcode.EMBED, Opcode.O_PROJ, Opcode.EXPERT_DOWN, Opcode.FFN_DOWN)


def check_coverage(table: Table) -> list[Fault]:
    """Every output of every layer, the division of dynamic work, and who owns what."""
    faults = [*_layers(table), *_shares(table), *_owners(table), *_heads(table)]
    return [*faults, *_vocabulary(table), *_writer(table)]


def _layers(table: Table) -> Iterator[Fault]:
    """The outputs that a step must have: a name for each, its tasks, and its number of tiles."""
    plan, sizes = table.plan, table.plan.sizes
    vocabulary = plan.weights.get(Kind.EMBEDDING).tiles
    yield from _once(table, Opcode.EMBED, None, sizes.residual_tiles)
    yield from _once(table, Opcode.LM_HEAD, None, vocabulary)
    for layer, described in enumerate(plan.config.layers):
        yield from _once(table, Opcode.QKV_PROJ, layer, sizes.kv_heads * sizes.qkv_tiles)
        yield from _once(table, Opcode.ATTENTION_MERGE, layer, sizes.attention_tiles)
        yield from _once(table, Opcode.O_PROJ, layer, sizes.residual_tiles)
        mlp = described.mlp
        if isinstance(mlp, DenseMLP):
            yield from _feed_forward(table, layer, Kind.FFN_UP, Buffer.HIDDEN)
            continue
        yield from _once(table, Opcode.ROUTER, layer, plan.weights.get(Kind.ROUTER, layer).tiles)
        yield from _once(table, Opcode.EXPERT_DOWN, layer, sizes.residual_tiles)
        if mlp.shared_experts:
            yield from _feed_forward(table, layer, Kind.SHARED_UP, Buffer.SHARED_HIDDEN)


def _feed_forward(table: Table, layer: int, kind: Kind, buffer: Buffer) -> Iterator[Fault]:
    tiles = table.plan.weights.get(kind, layer).tiles
    yield from _once(table, Opcode.FFN_UP, layer, tiles, (Field.OUTPUT, buffer))
    yield from _once(table, Opcode.FFN_DOWN, layer, table.plan.sizes.residual_tiles, (Field.INPUT, buffer))


def _once(
    table: Table, opcode: Opcode, layer: int | None, tiles: int, only: tuple[Field, int] | None = None
) -> Iterator[Fault]:
    """Tiles 0 .. tiles - 1 belong to one task each."""
    chosen = table.words[:, Field.OPCODE] == opcode
    if layer is not None:
        chosen &= table.words[:, Field.LAYER] == layer
    if only is not None:
        chosen &= table.words[:, only[0]] == only[1]
    group = Group(opcode, layer, table.words[chosen], table.sms[chosen])
    first, count = group[Field.FIRST_TILE], group[Field.TILE_COUNT]
    if (empty := count < 1).any():
        yield group.fault(Check.COVERAGE, "a task without tiles", empty)
        return
    if (outside := first + count > tiles).any():
        at = int(np.flatnonzero(outside)[0])
        last = int(first[at] + count[at] - 1)
        yield group.fault(Check.COVERAGE, f"tile {last} does not exist: there are {tiles}", outside)
        return
    made = np.zeros(tiles + 1, dtype=np.int64)
    np.add.at(made, first, 1)
    np.add.at(made, first + count, -1)
    made = np.cumsum(made)[:tiles]
    if (missing := np.flatnonzero(made == 0)).size:
        yield Fault(Check.COVERAGE, f"nobody makes tile {missing[0]} of {tiles}", opcode, layer)
    if (twice := np.flatnonzero(made > 1)).size:
        tile = int(twice[0])
        yield group.fault(
            Check.COVERAGE,
            f"tile {tile} is made {made[tile]} times",
            (first <= tile) & (tile < first + count),
        )


def _shares(table: Table) -> Iterator[Fault]:
    """Every share of divided work belongs to one task, on every SM, in every layer that has the work."""
    routed = {i for i, layer in enumerate(table.plan.config.layers) if not isinstance(layer.mlp, DenseMLP)}
    required: dict[Opcode, set[int | None]] = {
        Opcode.ATTENTION: set(range(table.plan.sizes.layers)),
        Opcode.EXPERT_UP: set(routed),
    }
    for opcode in (*sorted(DYNAMIC), *sorted(SAMPLING)):
        rounds = opcode is Opcode.SAMPLE_SELECT
        found: set[int | None] = set()
        for group in table.groups(opcode, Field.ROUND if rounds else None):
            found.add(int(group[Field.ROUND][0]) if rounds else group.layer)
            yield from _all_shares(group, table.plan.sizes.sms)
        expected = set(Round) if rounds else required.get(opcode, {None})
        for absent in sorted(expected - found, key=str):
            where = "" if absent is None else f" in {'round' if rounds else 'layer'} {absent}"
            yield Fault(Check.COVERAGE, f"nobody does it{where}", opcode)


def _all_shares(group: Group, sms: int) -> Iterator[Fault]:
    yield from group.unequal(Check.COVERAGE, Field.SHARES, sms, "the number of SMs")
    share = group[Field.SHARE]
    if (absent := share >= sms).any():
        yield group.fault(Check.COVERAGE, f"share {share[absent][0]} of {sms} does not exist", absent)
    times = np.bincount(share[share < sms], minlength=sms)
    if (missing := np.flatnonzero(times == 0)).size:
        yield group.fault(Check.COVERAGE, f"nobody has share {missing[0]} of {sms}")
    if (twice := np.flatnonzero(times > 1)).size:
        yield group.fault(
            Check.COVERAGE, f"share {twice[0]} is done {times[twice[0]]} times", share == twice[0]
        )
    if (several := np.bincount(group.sms, minlength=sms)[group.sms] > 1).any():
        yield group.fault(Check.COVERAGE, "an SM has more than one share", several)


def _owners(table: Table) -> Iterator[Fault]:
    """An SM's residual tiles are the same in every operation on the residual."""
    owned = np.zeros((table.plan.sizes.sms, 2), dtype=np.int64)
    for group in table.groups(Opcode.EMBED):
        owned[group.sms] = group.words[:, [Field.FIRST_TILE, Field.TILE_COUNT]]
    for opcode in _OWNED:
        by = Field.INPUT if opcode is Opcode.FFN_DOWN else None
        for group in table.groups(opcode, by):
            why = "the residual tiles that this SM embedded"
            yield from group.unequal(Check.COVERAGE, Field.FIRST_TILE, owned[group.sms, 0], why)
            yield from group.unequal(Check.COVERAGE, Field.TILE_COUNT, owned[group.sms, 1], why)


def _heads(table: Table) -> Iterator[Fault]:
    """A QKV task lies within its KV head; tiles stay together where pairs of elements are far apart."""
    sizes = table.plan.sizes
    for group in table.groups(Opcode.QKV_PROJ):
        first, last = group[Field.FIRST_TILE], group[Field.FIRST_TILE] + group[Field.TILE_COUNT] - 1
        for tile in (first, last):
            wrong = tile // sizes.qkv_tiles != group[Field.KV_HEAD]
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                head = group[Field.KV_HEAD][at]
                yield group.fault(Check.COVERAGE, f"tile {tile[at]} does not belong to KV head {head}", wrong)
        odd = (group[Field.ROPE] == Pairing.HALF_SPLIT) & ((first % 2 != 0) | (last % 2 == 0))
        if odd.any():
            yield group.fault(Check.COVERAGE, "half-split pairs need an even first tile and tile count", odd)


def _vocabulary(table: Table) -> Iterator[Fault]:
    """Every SM samples from its own logits, and shares ascend with tiles: ties go to the lowest id."""
    made = np.zeros((table.plan.sizes.sms, 2), dtype=np.int64)
    for group in table.groups(Opcode.LM_HEAD):
        made[group.sms] = group.words[:, [Field.FIRST_TILE, Field.TILE_COUNT]]
    for opcode in sorted(SAMPLING):
        if Field.TILE_COUNT not in USED[opcode]:
            continue
        for group in table.groups(opcode, Field.ROUND if opcode is Opcode.SAMPLE_SELECT else None):
            expected, why = made[group.sms], "the tiles whose logits this SM has"
            some = expected[:, 1] > 0
            yield from group.unequal(Check.COVERAGE, Field.TILE_COUNT, expected[:, 1], why)
            first = np.where(some, expected[:, 0], group[Field.FIRST_TILE])
            yield from group.unequal(Check.COVERAGE, Field.FIRST_TILE, first, why)
            ordered = np.argsort(group[Field.SHARE], kind="stable")
            ordered = ordered[some[ordered]]
            falls = np.diff(group[Field.FIRST_TILE][ordered]) < 0
            if falls.any():
                wrong = np.isin(np.arange(len(some)), ordered[1:][falls])
                yield group.fault(Check.COVERAGE, "shares do not ascend with their tiles", wrong)


def _writer(table: Table) -> Iterator[Fault]:
    """One SM speaks for a step."""
    writers = []
    for opcode in (Opcode.SAMPLE_PICK, Opcode.SAMPLE_COMMIT):
        for group in table.groups(opcode):
            speaks = (group[Field.FLAGS] & Flag.WRITER) != 0
            if (other := group[Field.FLAGS] & ~int(Flag.WRITER) != 0).any():
                yield group.fault(Check.COVERAGE, "its only flag is WRITER", other)
            writers.append(group.sms[speaks].tolist())
            if speaks.sum() != 1:
                yield group.fault(Check.COVERAGE, f"{speaks.sum()} SMs are the WRITER, and one must be")
    if [len(each) for each in writers] == [1, 1] and writers[0] != writers[1]:
        (picks,), (commits,) = writers
        message = f"SM {commits} is the WRITER here, and SM {picks} of SAMPLE_PICK"
        yield Fault(Check.COVERAGE, message, Opcode.SAMPLE_COMMIT, sm=commits)
