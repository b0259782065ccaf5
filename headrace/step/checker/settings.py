"""Do the descriptors say what the model's config says: windows, rotary pairs, norms, routing?"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.model.config import MoEMLP, Rope
from headrace.step.checker.faults import Check, Fault
from headrace.step.checker.table import Group, Table
from headrace.step.isa import USED, Field, Flag, Opcode, Pairing

_PAIRINGS = {
    Rope.NONE: Pairing.NONE,
    Rope.INTERLEAVED: Pairing.INTERLEAVED,
    Rope.HALF_SPLIT: Pairing.HALF_SPLIT,
}
_CHECKED = {Field.WINDOW, Field.ROPE, Field.NORM, Field.TOP_K, Field.FLAGS}


def check_settings(table: Table) -> list[Fault]:
    """All such fields of all operations on layers, and the last norm."""
    faults: list[Fault] = []
    for opcode, used in USED.items():
        if Field.LAYER in used and _CHECKED & set(used):
            for group in table.groups(opcode):
                faults += _layer(table, group)
    for group in table.groups(Opcode.LM_HEAD):
        last = table.plan.sizes.norms - 1
        faults += group.unequal(Check.SETTINGS, Field.NORM, last, "the norm before the head is the last")
    return faults


def _layer(table: Table, group: Group) -> Iterator[Fault]:
    layer = group.layer or 0
    described = table.plan.config.layers[layer]
    expected: dict[Field, int] = {
        Field.WINDOW: described.window or 0,
        Field.ROPE: _PAIRINGS[described.rope],
        Field.NORM: _norm(table, group.opcode, layer),
    }
    if isinstance(described.mlp, MoEMLP):
        mlp = described.mlp
        halved = bool(mlp.shared_experts) and not mlp.shared_sum
        normalized = mlp.normalize and group.opcode is Opcode.EXPERT_DOWN
        expected[Field.TOP_K] = mlp.top_k
        expected[Field.FLAGS] = (Flag.HALVE if halved else 0) | (Flag.NORMALIZE if normalized else 0)
    for field in sorted(_CHECKED.intersection(USED[group.opcode])):
        yield from group.unequal(Check.SETTINGS, field, expected.get(field, 0), "the config says so")


def _norm(table: Table, opcode: Opcode, layer: int) -> int:
    """A parallel block has one norm; a sequential one has a second for its feed-forward."""
    if table.plan.config.parallel_block:
        return layer
    return 2 * layer + (opcode is not Opcode.QKV_PROJ)
