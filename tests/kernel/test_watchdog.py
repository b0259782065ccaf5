"""The watchdog's words."""

from __future__ import annotations

import numpy as np

from headrace.kernel.records import HOST_LINK
from headrace.kernel.watchdog import Agent, Waited, explain
from headrace.model.presets import PRESETS
from headrace.step.isa import Field, Opcode
from headrace.step.planner import build_plan

PLAN = build_plan(PRESETS["north-micro-shape"], rows=1, sms=132)


def link(**values: int) -> np.void:
    record = np.zeros(1, HOST_LINK)
    for name, value in values.items():
        record[name] = value
    return np.void(record[0])


def test_a_counter_is_named_with_its_task_and_layer() -> None:
    where = np.argwhere(
        (PLAN.descriptors[..., Field.OPCODE] == Opcode.O_PROJ) & (PLAN.descriptors[..., Field.LAYER] == 2)
    )
    sm, task = (int(part) for part in where[0])
    counter = int(PLAN.descriptors[sm, task, Field.WAIT_COUNTER])
    text = explain(
        PLAN, link(aborted=1, sm=sm, agent=Agent.CONSUMER, task=task, index=counter, want=512, have=511)
    )
    assert f"consumer of SM {sm} waited for merge[2] to be 512, which is 511" in text
    assert "O_PROJ layer=2" in text


def test_other_waits_are_named_too() -> None:
    for waited in set(Waited) - {Waited.COUNTER}:
        text = explain(PLAN, link(sm=3, agent=Agent.LOADER, task=-1, waited=waited, index=5))
        assert "loader of SM 3" in text
        assert " 5" in text
        assert "an unknown task" in text
