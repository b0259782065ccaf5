"""Traces and pictures: well formed, and true to the timeline."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from headrace.step.cost import Costs, Timeline, simulate
from headrace.step.draw import COLOURS, SAMPLING, colour, verdict, write_picture, write_trace
from headrace.step.isa import Opcode
from headrace.step.workload import plan_works
from tests.step.oracle.setting import north, plan_of

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    plan = plan_of(north(), 4, 7)
    return simulate(plan_works(plan, context=300), ring_pages=11, in_flight=3, costs=Costs())


def test_a_trace_has_every_task_of_the_last_step(timeline: Timeline) -> None:
    file = io.StringIO()
    write_trace(timeline, file)
    events = json.loads(file.getvalue())["traceEvents"]
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert names == {(sm, f"SM {sm}") for sm in range(7)}
    for sm in range(7):
        mine = [event for event in events if event["ph"] == "X" and event["pid"] == sm]
        computed = [event for event in mine if event["tid"] == 1 and not event["name"].startswith("wait")]
        spans = [span for span in timeline.spans[sm] if span.work.step == 1]
        assert [event["name"] for event in computed] == [span.work.name for span in spans]
        for event, span in zip(computed, spans, strict=True):
            assert event["ts"] == pytest.approx(span.begin, abs=0.001)
            assert event["ts"] + event["dur"] == pytest.approx(span.end, abs=0.002)
        loaded = sum(event["args"]["bytes"] for event in mine if event["tid"] == 0)
        assert loaded == sum(span.work.pages * span.work.page_bytes for span in spans)
        lane = sorted((event["ts"], event["ts"] + event["dur"]) for event in mine if event["tid"] == 1)
        assert all(end <= begin + 0.002 for (_, end), (begin, _) in pairwise(lane))


def test_a_picture_shows_every_operation(timeline: Timeline) -> None:
    file = io.StringIO()
    write_picture(timeline, file, title="A <small> step & more", layer=1)
    root = ElementTree.fromstring(file.getvalue())
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert "A <small> step & more" in texts
    assert verdict(timeline) in texts
    assert "Layers 1 and 2 at close range" in texts
    legend = " ".join(texts)
    names = {span.work.name for spans in timeline.spans for span in spans}
    assert {"ROUTER", "EXPERT_DOWN", "FFN_UP", "LM_HEAD"} <= names
    for name in names:
        assert name.removeprefix("ATTENTION_").split("_")[0] in legend
    labels = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert any(label.startswith("EXPERT_UP of layer 1: ") for label in labels)
    for element in root.iter(f"{SVG}rect"):
        assert float(element.get("width", "0")) >= 0


def test_a_picture_of_one_sm_and_one_layer_from_the_end() -> None:
    plan = plan_of(north(), 1, 1)
    timeline = simulate(plan_works(plan, context=5), ring_pages=11, in_flight=3, costs=Costs())
    file = io.StringIO()
    write_picture(timeline, file, title="Small", layer=2)
    root = ElementTree.fromstring(file.getvalue())
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert "Layer 2 at close range" in texts
    assert {text for text in texts if text.startswith("SM ")} == {"SM 0"}


def test_the_verdict_is_of_the_last_step(timeline: Timeline) -> None:
    size = timeline.bytes_of(1)
    limit = size / 4.8e6
    assert f"{timeline.step_time / 1000:.3f} ms" in verdict(timeline)
    assert f"{limit / timeline.step_time:.1%}" in verdict(timeline)


def test_operations_have_colours_of_their_own() -> None:
    named = {opcode.name: colour(opcode.name) for opcode in Opcode}
    assert named["SAMPLE_PICK"] == SAMPLING
    assert named["FFN_UP"] == named["EXPERT_UP"]  # the same part of a layer
    assert len(set(COLOURS.values())) == len(COLOURS) - 2
