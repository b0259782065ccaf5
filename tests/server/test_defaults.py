"""A checkpoint's own sampling holds where a request says nothing, in every protocol and in the Python API."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace import LLM, SamplingParams
from headrace.cli import app
from headrace.cli.options import SamplingFlags
from headrace.client import Client
from headrace.load import SourceError, load, resolve
from tests.server import patient
from tests.server.scripted import Scripted, scripted_server

OWN = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "model": "scripted"},
    "/v1/responses": {"input": "hi"},
}


@pytest.fixture(scope="module")
def own() -> Iterator[Scripted]:
    with scripted_server(sampling=OWN) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_said_is_the_checkpoints(own: Scripted, path: str) -> None:
    assert patient.post(own.url + path, json=BODIES[path]).status_code == 200
    params = own.engine.submitted[-1].params
    assert {name: getattr(params, name) for name in OWN} == OWN
    said = BODIES[path] | {"temperature": 0, "top_p": 1}
    assert patient.post(own.url + path, json=said).status_code == 200
    params = own.engine.submitted[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0, 1, 20)


def test_loaded_from_the_folder_or_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve("north-micro"), folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 3, "temperature": 0.25, "top_k": 1}')
    asked = {"temperature": 0.25, "top_k": 1}
    assert load(str(folder), device="cpu").sampling == asked
    assert load(str(folder), device="cpu", generation_config="none").sampling == {}
    with pytest.raises(SourceError, match="'vllm' is unknown: choose model or none"):
        load(str(folder), generation_config="vllm")
    with LLM(str(folder), device="cpu", max_context=32, max_sequences=1) as llm:
        assert llm.sampling == SamplingParams(**asked)  # type: ignore[arg-type]
        with_own, greedy = (
            llm.generate("def f(", params)[0].token_ids[:8]
            for params in (None, SamplingParams(temperature=0))
        )
        assert with_own == greedy  # top_k 1


@pytest.mark.parametrize("sampling", [OWN, {}])
def test_the_terminal_leaves_a_servers_own_sampling_alone(sampling: dict[str, Any]) -> None:
    with scripted_server(sampling=sampling) as server:
        assert Client(server.url).default_sampling() == sampling
        result = CliRunner().invoke(app, ["chat", "--url", server.url, "--seed", "4"], input="hi\n")
        assert result.exit_code == 0
        params = server.engine.submitted[-1].params
    expected = sampling or {"temperature": 0.7, "top_p": 0.95}
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.seed == 4


def test_the_terminals_own_defaults_are_for_models_that_ask_for_nothing() -> None:
    assert SamplingFlags().params() == SamplingParams(temperature=0.7, top_p=0.95)
    assert SamplingFlags().params(OWN) == SamplingParams(**OWN)  # type: ignore[arg-type]
    assert SamplingFlags(temperature=0.1).params(OWN).temperature == 0.1
