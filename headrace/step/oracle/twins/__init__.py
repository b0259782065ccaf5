"""The Python twins of the device's operations, one file for each, under the same names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.step.isa import Field, Opcode
from headrace.step.oracle.clocks import Target
from headrace.step.oracle.core import Task
from headrace.step.oracle.twins import attention as attention_twin
from headrace.step.oracle.twins import sample_select as select_twin
from headrace.step.oracle.twins.attention_merge import attention_merge
from headrace.step.oracle.twins.embed import embed
from headrace.step.oracle.twins.expert_down import expert_down
from headrace.step.oracle.twins.expert_up import expert_up
from headrace.step.oracle.twins.ffn_down import ffn_down
from headrace.step.oracle.twins.ffn_up import ffn_up
from headrace.step.oracle.twins.lm_head import lm_head
from headrace.step.oracle.twins.o_proj import o_proj
from headrace.step.oracle.twins.qkv_proj import qkv_proj
from headrace.step.oracle.twins.router import list_experts, router
from headrace.step.oracle.twins.sample_commit import sample_commit
from headrace.step.oracle.twins.sample_pick import sample_pick
from headrace.step.oracle.twins.sample_stats import sample_stats


@dataclass(frozen=True, slots=True)
class Twin:
    """What an operation does on either agent: `load` on the loader, whose result `run` gets on the consumer.

    `waits` are the consumer's. All three take the task and, but for `load`, what was loaded.
    """

    run: Callable[[Task, Any], None]
    load: Callable[[Task], Any]
    waits: Callable[[Task, Any], list[Target]]


def descriptor_waits(task: Task, _loaded: object = None) -> list[Target]:
    """The waits that the descriptor names."""
    pairs = ((Field.WAIT_COUNTER, Field.WAIT_ARRIVALS), (Field.SECOND_COUNTER, Field.SECOND_ARRIVALS))
    return [
        Target(task[counter], task.epoch * task[arrivals]) for counter, arrivals in pairs if task[counter]
    ]


def _plain(run: Callable[[Task], None]) -> Twin:
    return Twin(lambda task, _: run(task), lambda task: None, descriptor_waits)


TWINS: dict[Opcode, Twin] = {
    Opcode.EMBED: _plain(embed),
    Opcode.ROUTER: _plain(router),
    Opcode.QKV_PROJ: _plain(qkv_proj),
    Opcode.ATTENTION: Twin(attention_twin.attention, attention_twin.fetch, attention_twin.waits),
    Opcode.ATTENTION_MERGE: _plain(attention_merge),
    Opcode.O_PROJ: _plain(o_proj),
    Opcode.EXPERT_UP: Twin(expert_up, list_experts, descriptor_waits),
    Opcode.EXPERT_DOWN: Twin(expert_down, list_experts, descriptor_waits),
    Opcode.FFN_UP: _plain(ffn_up),
    Opcode.FFN_DOWN: _plain(ffn_down),
    Opcode.LM_HEAD: _plain(lm_head),
    Opcode.SAMPLE_STATS: _plain(sample_stats),
    Opcode.SAMPLE_SELECT: Twin(
        lambda task, _: select_twin.sample_select(task),
        lambda task: None,
        lambda task, _: select_twin.waits(task),
    ),
    Opcode.SAMPLE_PICK: _plain(sample_pick),
    Opcode.SAMPLE_COMMIT: _plain(sample_commit),
}
