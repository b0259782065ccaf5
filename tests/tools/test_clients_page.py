"""docs/clients.md shows the set-ups and the results that there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.clients.__main__ import matrix
from tools.clients.catalogue import CLIENTS, Client, filled
from tools.clients.task import ABSENT, PASSED, Outcome

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "clients.md").read_text()
VALUES = {"url": "http://127.0.0.1:8000", "model": "North-Mini-Code-1.0"}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_set_ups_are_those_that_were_tried(client: Client) -> None:
    for text in client.settings.values():
        assert filled(text, VALUES).rstrip() in PAGE
    for name, text in client.environment.items():
        if name != "MODEL":  # that of our own small agent
            assert f"    export {name}={filled(text, VALUES)}\n" in PAGE


def test_the_matrix_is_that_of_the_results() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "clients.json").read_text())
    outcomes = [Outcome(**each) for each in results["clients"]]
    assert matrix(outcomes) in PAGE
    assert [outcome.client for outcome in outcomes] == [client.name for client in CLIENTS]


def test_a_matrix_tells_what_is_missing() -> None:
    text = matrix([Outcome("opencode", "1", PASSED, turns=2), Outcome("pi", "2", ABSENT, "no npm")])
    assert "| opencode | 1 | passed | 2 |" in text
    assert "| pi | 2 | not installable here: no npm |" in text
