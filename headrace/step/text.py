"""Descriptors as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.step.isa import USED, Buffer, Field, Flag, Opcode, Pairing, Round
from headrace.step.plan import Plan, Words


def describe(words: Words, counters: Sequence[str]) -> str:
    """One line for a descriptor: its operation, and its fields by name, counters and buffers by theirs.

    docs/step.md explains one.
    """
    opcode = Opcode(words[Field.OPCODE])
    used = USED[opcode]
    value = {field: int(words[field]) for field in used}
    parts = [opcode.name, *_plain(value), *_flow(value), *_counters(value, counters)]
    return " ".join(parts)


def _plain(value: dict[Field, int]) -> Iterator[str]:
    if Field.LAYER in value:
        yield f"layer={value[Field.LAYER]}"
    if Field.TILE_COUNT in value:
        first, count = value.get(Field.FIRST_TILE, 0), value[Field.TILE_COUNT]
        yield f"tiles={first}..{first + count - 1}" if count else "tiles=none"
    if Field.SHARE in value:
        yield f"share={value[Field.SHARE]}/{value[Field.SHARES]}"
    if Field.KV_HEAD in value:
        yield f"head={value[Field.KV_HEAD]}"
    if Field.PAGES_PER_TILE in value:
        yield f"k={value[Field.K]} pages={value[Field.PAGES_PER_TILE]}x{value[Field.PAGE_BYTES]}"
        yield f"@{value[Field.WEIGHTS]}"
    elif Field.PAGE_BYTES in value:
        yield f"pages=x{value[Field.PAGE_BYTES]}"
    for field in (Field.IN_FLIGHT, Field.EXPERTS, Field.TOP_K, Field.NORM, Field.WINDOW):
        if field in value:
            yield f"{field.name.lower()}={value[field]}"
    if Field.EXPERT_STRIDE in value:
        yield f"stride={value[Field.EXPERT_STRIDE]}"
    for field, names in ((Field.ROPE, Pairing), (Field.ROUND, Round)):
        if field in value:
            yield f"{field.name.lower()}={names(value[field]).name}"
    if value.get(Field.FLAGS):
        yield f"flags={Flag(value[Field.FLAGS]).name}"


def _flow(value: dict[Field, int]) -> Iterator[str]:
    if Field.INPUT in value:
        yield Buffer(value[Field.INPUT]).name
    if Field.OUTPUT in value:
        yield f"-> {Buffer(value[Field.OUTPUT]).name}"


def _counters(value: dict[Field, int], names: Sequence[str]) -> Iterator[str]:
    for kind in ("WAIT", "SECOND", "LOADER"):
        counter = value.get(Field[f"{kind}_COUNTER"], 0)
        if counter:
            lag = " of the step before" if value.get(Field.LOADER_LAG) and kind == "LOADER" else ""
            span = value.get(Field.WAIT_SPAN, 1) if kind == "WAIT" else 1
            more = f" (x{span})" if span > 1 else ""
            yield f"{kind.lower()} {_name(counter, names)}={value[Field[f'{kind}_ARRIVALS']]}{more}{lag}"
    if value.get(Field.SIGNAL_COUNTER):
        yield f"signal {_name(value[Field.SIGNAL_COUNTER], names)}+{value[Field.SIGNAL_AMOUNT]}"


def _name(counter: int, names: Sequence[str]) -> str:
    return names[counter] if 0 <= counter < len(names) else f"counter {counter}"


def listing(plan: Plan, sm: int, layer: int | None = None) -> Iterator[str]:
    """The list of one SM, a line each; of one layer where given."""
    for index, words in enumerate(plan.tasks(sm)):
        layered = Field.LAYER in USED[Opcode(words[Field.OPCODE])]
        if layer is None or (layered and words[Field.LAYER] == layer):
            yield f"{index:4d}  {describe(words, plan.counters)}"
