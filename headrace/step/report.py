"""A plan in a few figures."""

from __future__ import annotations

import numpy as np

from headrace.step.buffers import arena, buffer_specs
from headrace.step.isa import USED, Field, Opcode
from headrace.step.machine import SHARED_BYTES
from headrace.step.plan import Plan
from headrace.step.shared_memory import shared_bytes


def summary(plan: Plan) -> dict[str, str]:
    """What a plan is for, how large it is, and what of an SM it uses; labels and figures."""
    sizes, lengths = plan.sizes, plan.lengths
    opcodes = plan.descriptors[:, :, Field.OPCODE]
    owned = plan.descriptors[:, :, Field.TILE_COUNT][opcodes == Opcode.EMBED]
    used = shared_bytes(plan.machine, sizes, int(owned.max()))
    _, activations = arena(buffer_specs(sizes))
    return {
        "For": f"up to {sizes.rows} rows, {sizes.sms} SMs, {sizes.layers} layers",
        "Tasks": f"{lengths.sum():,}, {lengths.min()} to {lengths.max()} an SM",
        "Descriptors": f"{plan.bytes:,} bytes",
        "Counters": f"{len(plan.counters) - 1:,}",
        "Weights": f"{plan.weights.bytes:,} bytes of pages",
        "Activations": f"{activations:,} bytes",
        "Ring": f"{plan.machine.ring_pages} pages, {_in_flight(plan)} under way",
        "Shared memory": f"{used:,} of {SHARED_BYTES:,} bytes",
        "Static pages": _spread(static_bytes(plan)),
    }


def _in_flight(plan: Plan) -> str:
    """Of the tasks that have pages: the fewest and the most that may be under way, or the number of all."""
    numbers = plan.descriptors[:, :, Field.IN_FLIGHT]
    least, most = numbers[numbers > 0].min(), numbers.max()
    return str(most) if least == most else f"{least} to {most}"


def static_bytes(plan: Plan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Bytes of pages that every SM reads in any step: all but attention's and the experts'."""
    words = plan.descriptors.astype(np.int64)
    amounts = (
        words[:, :, Field.TILE_COUNT] * words[:, :, Field.PAGES_PER_TILE] * words[:, :, Field.PAGE_BYTES]
    )
    streams = [op for op, used in USED.items() if Field.K in used and Field.EXPERT_STRIDE not in used]
    static = np.isin(words[:, :, Field.OPCODE], [op.value for op in streams if op is not Opcode.EMBED])
    total: np.ndarray[tuple[int], np.dtype[np.int64]] = np.where(static, amounts, 0).sum(axis=1)
    return total


def _spread(amounts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    mean, largest = float(amounts.mean()), int(amounts.max())
    return f"{amounts.min():,} to {largest:,} bytes an SM; the largest is {largest / mean:.3f} of the mean"
