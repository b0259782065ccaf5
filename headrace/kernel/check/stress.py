"""The same launch over and over: whatever an SM reads before it is there shows sooner or later.

Nothing orders the kernel's hops from SM to SM but counters (`publish.h`). Between launches every exchange
buffer is poisoned, so that what is left of the launch before, which would be right, cannot stand in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.kernel.check.against_oracle import run
from headrace.kernel.check.kernels import Kernel, Rows, Tokens, logits_of
from headrace.step.isa import Buffer, Field, Opcode
from headrace.step.plan import Plan


def hops(plan: Plan) -> int:
    """How often a step waits within its layers for what other SMs have made: once a counter."""
    opcodes, signals = plan.descriptors[..., Field.OPCODE], plan.descriptors[..., Field.SIGNAL_COUNTER]
    within = (opcodes >= Opcode.ROUTER) & (opcodes < Opcode.LM_HEAD)
    return len(set(np.unique(signals[within]).tolist()) - {0})


@dataclass(frozen=True)
class Outcome:
    """What a launch made of its rows, and what it left of its last step."""

    tokens: list[Tokens]
    logits: Tensor
    x: Tensor  # the residual stream after the last layer

    def __eq__(self, other: object) -> bool:
        """To the bit; what is no number differs from all."""
        return (
            isinstance(other, Outcome)
            and self.tokens == other.tokens
            and torch.equal(self.logits, other.logits)
            and torch.equal(self.x, other.x)
        )


def outcome(kernel: Kernel, plan: Plan, rows: Rows, steps: int, *, at_once: bool = True) -> Outcome:
    """Of steps in one launch after poisoning, or in a launch each, poisoned in between.

    Rows begin where they say, whatever was run before.
    """
    kernel.poison()
    tokens = run(kernel, rows, steps, at_once=at_once)
    live = [index for index, row in enumerate(rows) if row is not None]
    return Outcome(tokens, logits_of(kernel, plan)[live], kernel.buffer(Buffer.X)[:, live].clone())


def changed_under_stress(
    kernel: Kernel, plan: Plan, rows: Rows, right: Outcome, hop_count: int, *, at_once: bool = True
) -> int:
    """Launches that came to another outcome than `right` in at least so many hops. To be 0."""
    steps = len(right.tokens)
    repeats = -(-hop_count // (hops(plan) * steps))
    return sum(outcome(kernel, plan, rows, steps, at_once=at_once) != right for _ in range(repeats))
