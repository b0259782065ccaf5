"""Do loader and consumers mean the same pages, and are these the right ones?

The loader counts pages by PAGES_PER_TILE and PAGE_BYTES, the consumers by K: a tile has the bytes of its rows
by K columns, cut between blocks of columns. And a page must be the one that `weights` and `layout` put there.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.model.kv import BLOCK_TOKENS
from headrace.step.checker.faults import Check, Fault
from headrace.step.checker.table import Group, Table
from headrace.step.isa import ELEMENT_BYTES, TILE_ROWS, UNIT, Buffer, Field, Opcode
from headrace.step.weights import Kind, Matrix

_KINDS = {
    Opcode.EMBED: Kind.EMBEDDING,
    Opcode.ROUTER: Kind.ROUTER,
    Opcode.QKV_PROJ: Kind.QKV,
    Opcode.O_PROJ: Kind.O,
    Opcode.EXPERT_UP: Kind.EXPERT_UP,
    Opcode.EXPERT_DOWN: Kind.EXPERT_DOWN,
}


def check_pages(table: Table) -> list[Fault]:
    """The pages of every operation that reads any."""
    faults: list[Fault] = []
    for opcode in (*_KINDS, Opcode.FFN_UP, Opcode.FFN_DOWN, Opcode.LM_HEAD):
        by = {Opcode.FFN_UP: Field.OUTPUT, Opcode.FFN_DOWN: Field.INPUT}.get(opcode)
        for group in table.groups(opcode, by):
            faults += _agreement(group)
            matrix = _matrix(table, group)
            if matrix is None:
                faults.append(group.fault(Check.PAGES, "the layer has no such weights", group[Field.K] >= 0))
                continue
            faults += _weights(group, matrix)
            faults += _input(table, group)
    for group in table.groups(Opcode.ATTENTION):
        page = BLOCK_TOKENS * table.plan.sizes.head_dim * ELEMENT_BYTES
        faults += group.unequal(Check.PAGES, Field.PAGE_BYTES, page, "the keys, or values, of a block")
    return faults


def _agreement(group: Group) -> Iterator[Fault]:
    rows = TILE_ROWS * (2 if group.opcode in (Opcode.EXPERT_UP, Opcode.FFN_UP) else 1)
    tile = group[Field.K] * rows * ELEMENT_BYTES
    loaded = group[Field.PAGES_PER_TILE] * group[Field.PAGE_BYTES]
    wrong = tile != loaded
    if wrong.any():
        yield group.fault(
            Check.PAGES,
            f"the loader brings {loaded[wrong][0]} bytes a tile and the consumers take {tile[wrong][0]}",
            wrong,
        )
    if (cut := group[Field.PAGE_BYTES] % UNIT != 0).any():
        yield group.fault(Check.PAGES, "a page ends within a block of columns", cut)


def _matrix(table: Table, group: Group) -> Matrix | None:
    weights = table.plan.weights
    if group.opcode is Opcode.LM_HEAD:
        return weights.get(Kind.EMBEDDING if table.plan.config.tied_head else Kind.HEAD)
    if group.opcode is Opcode.EMBED:
        return weights.get(Kind.EMBEDDING)
    if group.opcode is Opcode.FFN_UP:
        kind = Kind.SHARED_UP if group[Field.OUTPUT][0] == Buffer.SHARED_HIDDEN else Kind.FFN_UP
    elif group.opcode is Opcode.FFN_DOWN:
        kind = Kind.SHARED_DOWN if group[Field.INPUT][0] == Buffer.SHARED_HIDDEN else Kind.FFN_DOWN
    else:
        kind = _KINDS[group.opcode]
    return weights.matrices.get((kind, group.layer or 0))


def _weights(group: Group, matrix: Matrix) -> Iterator[Fault]:
    where = matrix.offset + group[Field.FIRST_TILE] * matrix.tile_units
    if group.opcode is Opcode.EMBED:
        where = where * 0 + matrix.offset  # tokens, not tiles of the task, say which rows are read
    why = f"so the {matrix.kind} weights lie"
    yield from group.unequal(Check.PAGES, Field.WEIGHTS, where, why)
    yield from group.unequal(Check.PAGES, Field.K, matrix.k, why)
    yield from group.unequal(Check.PAGES, Field.PAGES_PER_TILE, matrix.pages_per_tile, why)
    yield from group.unequal(Check.PAGES, Field.PAGE_BYTES, matrix.page_bytes, why)
    if group.opcode in (Opcode.EXPERT_UP, Opcode.EXPERT_DOWN):
        yield from group.unequal(Check.PAGES, Field.EXPERT_STRIDE, matrix.stride, why)
        yield from group.unequal(Check.PAGES, Field.EXPERTS, matrix.experts, why)
    if group.opcode is Opcode.EXPERT_UP:
        yield from group.unequal(Check.PAGES, Field.FIRST_TILE, 0, "items begin at the first tile")
        yield from group.unequal(Check.PAGES, Field.TILE_COUNT, matrix.tiles, "the tiles of one expert")
    if group.opcode is Opcode.ROUTER:
        yield from group.unequal(Check.PAGES, Field.EXPERTS, matrix.outputs, why)


def _input(table: Table, group: Group) -> Iterator[Fault]:
    """K is the extent of the buffer that the operation reads."""
    sizes = table.plan.sizes
    if group.opcode in (Opcode.EMBED, Opcode.EXPERT_DOWN, Opcode.FFN_DOWN):
        return  # the first has no such buffer; what the others read varies in width from layer to layer
    extent = sizes.attention_tiles * TILE_ROWS if group.opcode is Opcode.O_PROJ else sizes.hidden
    yield from group.unequal(Check.PAGES, Field.K, extent, "the input has so many elements a row")
