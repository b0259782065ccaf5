"""The dashboard asks for figures that exist, and the documentation names them all."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server import patient
from tests.server.scripted import Scripted, scripted_server
from tests.server.test_chat import PATH, user
from tests.server.test_metrics import settled

ROOT = Path(__file__).resolve().parent.parent.parent
DASHBOARD = ROOT / "ops" / "grafana" / "headrace.json"
OPERATIONS = ROOT / "docs" / "operations.md"
NAME = re.compile(r"headrace:\w+")
COLUMNS = 24  # of Grafana's grid


@pytest.fixture(scope="module")
def served() -> Iterator[Scripted]:
    """A server that has answered a request and refused another, so that all its figures are there."""
    with scripted_server() as server:
        patient.post(server.url + PATH, json={"messages": user("hi")})
        patient.get(f"{server.url}/nowhere")
        settled(server, "request_errors_total{kind=unknown_path}", 1)
        yield server


@pytest.fixture(scope="module")
def labels(served: Scripted) -> dict[str, set[str]]:
    """The labels of every sample of a running server, by its name."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(patient.get(f"{served.url}/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    loaded = json.loads(DASHBOARD.read_text())
    assert isinstance(loaded, dict)
    return loaded


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def unknown(expression: str, labels: dict[str, set[str]]) -> set[str]:
    """The figures of an expression that do not exist, and the labels that those of it do not have."""
    names = set(NAME.findall(expression))
    known = set().union(*(labels.get(name, set()) for name in names))
    used = set(re.findall(r"(\w+)=~?\"", expression))
    for group in re.findall(r"by \(([^)]*)\)", expression):
        used.update(re.split(r",\s*", group))
    return {name for name in names if name not in labels} | (used - known)


@pytest.mark.parametrize("expression", expressions())
def test_what_is_asked_for_exists(expression: str, labels: dict[str, set[str]]) -> None:
    assert NAME.search(expression)
    assert not unknown(expression, labels)


def test_what_does_not_exist_is_seen(labels: dict[str, set[str]]) -> None:
    assert unknown("rate(headrace:decode_step_total[1m])", labels) == {"headrace:decode_step_total"}
    assert unknown("sum by (sort) (headrace:kv_cache_blocks)", labels) == {"sort"}
    assert unknown('headrace:num_requests_running{model="x"}', labels) == {"model"}


def test_legends_and_variables_use_labels_that_exist(labels: dict[str, set[str]]) -> None:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), panel["title"]
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert set(variables) == {"datasource", "model"}
    asked = re.fullmatch(r"label_values\((\S+), (\w+)\)", variables["model"]["definition"])
    assert asked is not None
    assert asked[2] in labels[asked[1]]


def test_the_form_is_what_grafana_provisions() -> None:
    board = dashboard()
    assert isinstance(board["schemaVersion"], int)
    assert board["uid"] and board["title"]  # noqa: PT018
    assert "id" not in board, "an id belongs to one Grafana: a provisioned dashboard has none"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in {"stat", "timeseries", "heatmap"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_no_panel_lies_over_another() -> None:
    def cells(position: dict[str, int]) -> set[tuple[int, int]]:
        assert position["x"] + position["w"] <= COLUMNS
        columns = range(position["x"], position["x"] + position["w"])
        return set(itertools.product(columns, range(position["y"], position["y"] + position["h"])))

    taken = [cells(panel["gridPos"]) for panel in dashboard()["panels"]]
    assert len(set().union(*taken)) == sum(map(len, taken))


def test_the_documentation_names_every_figure_and_no_other(served: Scripted) -> None:
    families = text_string_to_metric_families(patient.get(f"{served.url}/metrics").text)
    told = {family.name for family in families if not family.name.endswith("_created")}
    documented = set(re.findall(r"^\| `(headrace:\w+)` \|", OPERATIONS.read_text(), re.MULTILINE))
    assert documented == {name for name in told if name.startswith("headrace:")}
