"""Does an SM have what the plan asks of it?"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.step.checker.faults import Check, Fault
from headrace.step.checker.table import Table
from headrace.step.isa import USED, Field, Opcode
from headrace.step.machine import (
    CONSUMER_GROUPS,
    CONSUMER_REGISTERS,
    GROUP_THREADS,
    ORDER_PAGES,
    OTHER_REGISTERS,
    REGISTERS,
    SHARED_BYTES,
    WORKING_REGISTERS,
    activation_registers,
)
from headrace.step.shared_memory import shared_bytes
from headrace.step.weights import pages_per_tile

# What holds no activations: projections onto the residual take page by page what registers have no room for.
_OTHERS = (Opcode.EMBED, Opcode.O_PROJ, Opcode.FFN_DOWN)


def check_budget(table: Table) -> list[Fault]:
    """Ring, orders, shared memory and registers."""
    return [*_ring(table), *_orders(table), *_shared(table), *_registers(table)]


def _ring(table: Table) -> Iterator[Fault]:
    room = table.plan.machine.ring_pages
    for opcode, used in USED.items():
        if Field.IN_FLIGHT not in used:
            continue
        for group in table.groups(opcode):
            pages = group[Field.IN_FLIGHT]
            if (wrong := pages > room).any():
                message = f"{pages[wrong][0]} pages in flight do not fit a ring of {room}: lower in_flight"
                yield group.fault(Check.BUDGET, message, wrong)


def _orders(table: Table) -> Iterator[Fault]:
    """The loader has the pages of a task's tiles, or of those of one expert, brought in by one order."""
    for opcode, used in USED.items():
        if Field.PAGES_PER_TILE not in used or opcode is Opcode.EMBED:  # which reads the rows of tokens
            continue
        for group in table.groups(opcode):
            pages = group[Field.TILE_COUNT] * group[Field.PAGES_PER_TILE]
            if (wrong := pages > ORDER_PAGES).any():
                yield group.fault(
                    Check.BUDGET,
                    f"{pages[wrong][0]} pages are more than the {ORDER_PAGES} of one order: take more SMs",
                    wrong,
                )


def _shared(table: Table) -> Iterator[Fault]:
    for group in table.groups(Opcode.EMBED):
        tiles = group[Field.TILE_COUNT]
        needed = shared_bytes(table.plan.machine, table.plan.sizes, int(tiles.max()))
        if needed > SHARED_BYTES:
            yield group.fault(
                Check.BUDGET,
                f"{needed} bytes of shared memory ({table.plan.machine.ring_pages} pages of ring, "
                f"{tiles.max()} residual tiles) are more than {SHARED_BYTES}: take fewer pages or more SMs",
                tiles == tiles.max(),
            )


def _registers(table: Table) -> Iterator[Fault]:
    held = GROUP_THREADS * (CONSUMER_GROUPS * CONSUMER_REGISTERS + OTHER_REGISTERS)
    if held > REGISTERS:
        yield Fault(Check.BUDGET, f"the threads of a block take {held} registers of {REGISTERS}")
    refused: set[int] = set()
    for opcode, used in USED.items():
        if Field.K not in used or opcode in _OTHERS:
            continue
        for group in table.groups(opcode, Field.K):
            k = int(group[Field.K][0])
            if k in refused:
                continue
            needed = activation_registers(k, table.plan.sizes.rows, pages_per_tile(k)) + WORKING_REGISTERS
            if needed > CONSUMER_REGISTERS:
                refused.add(k)
                yield group.fault(
                    Check.BUDGET,
                    f"{table.plan.sizes.rows} rows of {k} activations and the work on them take {needed} "
                    f"registers a thread, and there are {CONSUMER_REGISTERS}",
                    group[Field.K] == k,
                )
