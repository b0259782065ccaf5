"""A made-up launch in figures, and for Perfetto."""

from __future__ import annotations

import io
import json
import math
import re

import numpy as np
import pytest

from headrace.kernel.trace import Lane, Trace, read_trace
from headrace.kernel.trace_events import name_of, write_events
from headrace.kernel.trace_picture import in_words, timeline_of
from headrace.kernel.trace_summary import hops, kind_of, lines, memory_lines, operation_times
from headrace.step.draw import write_picture
from headrace.step.isa import Field, Opcode
from headrace.step.planner import build_plan
from tests.kernel.recorded import HELPED, Recording, everything
from tests.step.configs import TINY

PLAN = build_plan(TINY, rows=1, sms=3)


def whole(steps: int = 3) -> Trace:
    return read_trace(PLAN, steps, everything(PLAN, steps))


def test_an_operations_time_is_split_into_its_waits_and_its_work() -> None:
    times = {time.operation: time for time in operation_times(whole())}
    opcodes = PLAN.descriptors[..., Field.OPCODE]
    assert set(times) == {Opcode(number).name for number in np.unique(opcodes) if number}
    for name, time in times.items():
        count = (opcodes == Opcode[name]).sum() / 3  # of an SM
        assert time.tasks == pytest.approx(count)
        parts = (time.queue, time.inputs, time.working)
        assert parts == pytest.approx((0.1 * count, 0.25 * count, 0.65 * count), abs=0.05)
        assert time.total == pytest.approx(count, rel=1e-2)


def test_loaders_and_helpers_have_times_of_their_own() -> None:
    trace = whole()
    opcodes = PLAN.descriptors[..., Field.OPCODE]
    loads = operation_times(trace, trace.loaders)
    assert [time.operation for time in loads] == [time.operation for time in operation_times(trace)]
    helped = operation_times(trace, trace.helpers)
    assert {time.operation for time in helped} == {opcode.name for opcode in HELPED}
    for time in helped:
        count = (opcodes == Opcode[time.operation]).sum() / 3
        assert (time.inputs, time.working) == pytest.approx((0.3 * count, 0.2 * count), abs=0.05)


def test_the_first_step_does_not_count_where_there_are_others() -> None:
    recording = Recording(PLAN, 2)
    for step, inputs in ((0, 100), (1, 2)):
        recording.task(
            Lane.CONSUMERS, 0, step, 0, (200 * step, 200 * step, 200 * step, 200 * step + 150), inputs
        )
    (first, *_) = operation_times(read_trace(PLAN, 2, recording.memory))
    assert first.inputs == pytest.approx(2 / 3, abs=1e-2)  # of three SMs one had a task


def one_hop() -> Trace:
    """The signals of a counter come at 10, 12 and 15; two tasks that wait for it see it at 16 and 17."""
    recording = Recording(PLAN, 1)
    waits = (PLAN.descriptors[..., Field.OPCODE] == Opcode.O_PROJ) & (PLAN.descriptors[..., Field.LAYER] == 2)
    seen = iter((16.0, 17.0, 15.5))
    for sm, task in np.argwhere(waits).tolist()[:3]:
        now = next(seen)
        inputs = now - 9 if now != 15.5 else 0.0  # the third had no need to wait
        recording.task(Lane.CONSUMERS, sm, 0, task, (8, 9, now, 20), inputs)
    (counter,) = set(PLAN.descriptors[waits][:, Field.WAIT_COUNTER].tolist())
    for sm, end in enumerate((10.0, 12.0, 15.0)):
        recording.signal(sm, counter, end - 1, end)
    return read_trace(PLAN, 1, recording.memory)


def test_what_a_hop_costs() -> None:
    (dearest, *rest) = hops(one_hop())
    assert dearest.counter == "merge"
    assert dearest.exposed == pytest.approx((7 + 8) / 3, abs=1e-2)  # of three SMs
    assert dearest.each == pytest.approx(dearest.exposed / dearest.hops)
    assert dearest.hops == TINY.num_layers
    assert dearest.slowest == pytest.approx(3, abs=1e-2)  # from 12 to 15
    assert dearest.latency == pytest.approx(1.5, abs=1e-2)  # the median of 1 and 2
    assert all(hop.exposed == 0 and math.isnan(hop.latency) for hop in rest)


def test_kinds_of_counters() -> None:
    assert kind_of("qkv[3][1]") == "qkv"
    assert kind_of("commit") == "commit"


def test_the_summary_as_text() -> None:
    text = list(lines(whole()))
    assert text[0].startswith("3 steps recorded; ")
    assert any(line.startswith("EXPERT_UP") for line in text)
    assert any(line.startswith("all ") for line in text)
    assert any(line.startswith("qkv ") for line in text)
    assert all(len(line) <= 110 for line in text)


def test_the_rate_at_which_an_operations_pages_are_asked_for() -> None:
    """A copier is half a microsecond at each task: at five of O and four of the experts' up."""
    head, columns, *rows = memory_lines(whole(), {Opcode.O_PROJ: 4.5e6, Opcode.EXPERT_UP: 9e6})
    assert head.startswith("its copier")
    assert columns.split()[-2:] == ["MB", "TB/s"]
    assert [row.split() for row in rows] == [
        ["O_PROJ", "5.0", "2.5", "0.5", "4.5", "1.80"],
        ["EXPERT_UP", "4.0", "2.0", "0.4", "9.0", "4.50"],
        ["all", "4.5", "13.5", "3.00"],
    ]


def events(trace: Trace, steps: list[int], sms: list[int]) -> list[dict[str, object]]:
    file = io.StringIO()
    write_events(trace, file, steps=steps, sms=sms)
    found = json.loads(file.getvalue())["traceEvents"]
    assert isinstance(found, list)
    return found


def test_perfetto_gets_every_task_under_its_name() -> None:
    found = events(whole(), [1], [0, 2])
    slices = [event for event in found if event["ph"] == "X"]
    assert {event["pid"] for event in found} == {0, 2}
    for sm in (0, 2):
        right = sorted(name_of(words) for words in PLAN.tasks(sm))
        for lane in (Lane.CONSUMERS, Lane.COPIER, Lane.LOADER):
            mine = [event for event in slices if event["pid"] == sm and event["tid"] == lane]
            assert sorted(str(event["name"]) for event in mine if "args" in event) == right
    assert any(event["name"] == "EXPERT_UP 3" for event in slices)
    assert any(str(event["name"]).startswith("wait down[") for event in slices)
    waits = {
        lane: {re.sub(r"\[.*", "", str(event["name"])) for event in slices if event["tid"] == lane} - names
        for lane, names in ((lane, {name_of(w) for w in PLAN.tasks(0)}) for lane in Lane)
    }
    assert {"wait choice", "wait commit", "wait slot"} <= waits[Lane.LOADER]
    assert {"wait router", "wait attention"} <= waits[Lane.HELPER]
    signals = [event for event in slices if event["tid"] == Lane.PUBLISHER]
    assert any(str(event["name"]).startswith("qkv[") for event in signals)


def test_the_picture_has_every_task_of_the_last_step_where_it_was() -> None:
    trace = whole()
    timeline = timeline_of(trace)
    assert timeline.begin == pytest.approx(trace.ends[1])
    assert timeline.end_of(2) == pytest.approx(trace.ends[2])
    for sm, spans in enumerate(timeline.spans):
        mine = [span for span in spans if span.work.step == 2]
        assert [span.work.name for span in mine] == [Opcode(w[Field.OPCODE]).name for w in PLAN.tasks(sm)]
        for task, span in enumerate(mine):
            assert (span.begin, span.end) == (
                trace.consumers.seen[sm, 2, task],
                trace.consumers.end[sm, 2, task],
            )
            if span.work.name == "QKV_PROJ":
                assert span.work.pages
                assert span.loading == (trace.copiers.seen[sm, 2, task], trace.copiers.end[sm, 2, task])
            assert not (span.work.name.startswith("SAMPLE") and span.work.pages)
    file = io.StringIO()
    write_picture(timeline, file, title="Made up", layer=1, words=in_words(trace))
    assert "<title>QKV_PROJ of layer 1</title>" in file.getvalue()
    assert "Pages in the ring" not in file.getvalue()
    assert f"Recorded: {trace.step_time / 1e3:.3f} ms a step" in file.getvalue()


def test_a_wait_lies_at_the_beginning_of_its_task() -> None:
    found = [
        event
        for event in events(whole(), [2], [1])
        if event.get("tid") == Lane.CONSUMERS and event["ph"] == "X"
    ]
    tasks = [event for event in found if "args" in event]
    waits = [event for event in found if str(event["name"]).startswith("wait ")]
    begins = {event["ts"] for event in tasks}
    assert waits
    assert all(event["ts"] in begins and event["dur"] == pytest.approx(0.25, abs=2e-3) for event in waits)
    assert all(event["dur"] == pytest.approx(0.9, abs=2e-3) for event in tasks)
