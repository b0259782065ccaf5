"""The emulated kernel where threads of one SM go on only when nobody else can.

No order that is drawn at random holds a warp for as long as this, and a GPU hardly does; but nothing rules it
out. Needs a C++ compiler.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.kernel.check.against_oracle import BOUND, Bench, buffer_errors, step_errors, worst
from headrace.model.config import ModelConfig, MoEMLP
from headrace.step.isa import Field, Opcode
from headrace.step.oracle.world import north, tokens_of
from headrace.step.plan import Plan
from headrace.step.planner import build_plan
from tests.kernel.emulated import COMPILER, EmulationError, Spoilt
from tests.kernel.emulated.decode import Late
from tests.kernel.emulated.libraries import Libraries

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
SMS, ROWS = 6, 2
LENGTHS = [70, 33]

NARROW = replace(north(), hidden_size=32)  # four tiles of the residual: two SMs have none, no SM has two
# At four rows its hidden values do not fit into shared memory, for which all consumers would meet.
UNSTAGED = replace(north(MoEMLP(width=384, experts=6, top_k=2)), hidden_size=32)
ROUTED = replace(NARROW, layers=(replace(NARROW.layers[0], mlp=NARROW.layers[1].mlp), *NARROW.layers[1:]))

READS_LATE: Spoilt = (
    "ops/expert_down.h",
    "expert_down_any(c, task, count, variant",
    "expert_down_any(c, task, c.s.route.count, variant",
)
NO_WAIT: Spoilt = ("helper.h", "if (!wait_for_rows(", "if (false && !wait_for_rows(")


def tasks(plan: Plan, sm: int) -> list[tuple[Opcode, int]]:
    """Operations of an SM, each with its layer."""
    return [(Opcode(int(words[Field.OPCODE])), int(words[Field.LAYER])) for words in plan.descriptors[sm]]


def plan_of(config: ModelConfig, rows: int = ROWS) -> Plan:
    return build_plan(config, rows=rows, sms=SMS)


def test_warps_without_a_tile_may_come_when_the_next_layer_has_routed(libraries: Libraries) -> None:
    """Of EXPERT_DOWN: nobody waits for them, and how many pages they skip is the number of experts."""
    for config, rows in ((NARROW, ROWS), (UNSTAGED, 4)):
        late = [Late(sm, 128, 256) for sm in without_router(plan_of(config, rows))]
        assert late
        for one in late:
            errors = step_errors(libraries.bench(LENGTHS, rows, config=config, sms=SMS, late=one))
            assert worst(errors) <= BOUND, errors
    with pytest.raises(EmulationError, match="gave up"):
        step_errors(libraries.bench(LENGTHS, 4, config=UNSTAGED, sms=SMS, late=late[0], spoilt=READS_LATE))


def without_router(plan: Plan) -> list[int]:
    """SMs with one tile of the residual that no ROUTER makes all consumers meet on."""
    return [
        sm
        for sm in range(SMS)
        if (Opcode.EXPERT_DOWN, 1) in tasks(plan, sm) and (Opcode.ROUTER, 2) not in tasks(plan, sm)
    ]


def test_consumers_may_commit_when_others_have_routed_the_next_step(libraries: Libraries) -> None:
    """Where the first layer routes: an SM with no part in its logits must not route by the rows of before."""
    plan = plan_of(ROUTED)
    [sm] = [sm for sm in range(SMS) if not {(Opcode.EMBED, 0), (Opcode.ROUTER, 0)} & set(tasks(plan, sm))]
    late = Late(sm, 0, 256)
    right = libraries.bench(LENGTHS, ROWS, config=ROUTED, sms=SMS, late=late)
    assert worst(errors_after_an_end(right)) <= BOUND
    wrong = libraries.bench(LENGTHS, ROWS, config=ROUTED, sms=SMS, late=late, spoilt=NO_WAIT)
    with pytest.raises(AssertionError):
        assert worst(errors_after_an_end(wrong)) <= BOUND


def errors_after_an_end(bench: Bench, steps: int = 3) -> dict[str, float]:
    """Of the buffers after steps in the first of which a row ends, when tokens are the oracle's."""
    first = bench.rows[0]
    assert first is not None
    bench.rows[0], bench.live = replace(first, max_tokens=1), bench.live[1:]
    oracle, kernel = bench.oracle(), bench.kernel()
    right = [tokens_of(sampled) for sampled in oracle.launch(bench.rows, steps)]
    assert list(kernel.launch(bench.rows, steps)) == right, "other tokens than the oracle's"
    return buffer_errors(bench, kernel, oracle)
