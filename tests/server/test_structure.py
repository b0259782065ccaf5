"""Answers and calls that keep to a schema, whatever the model would say."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest

from headrace.model import markers
from headrace.model.tokenizer import Tokenizer
from headrace.server.structure import grammars
from tests.server import patient
from tests.server.north import action, call, joined, text, thinks
from tests.server.scripted import VOCABULARY, Scripted, ScriptedBackend, scripted_server
from tests.server.test_chat import PATH, events, user
from tests.server.test_errors import error_of
from tests.waiting import WAIT

COLOURS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "dark": {"type": "boolean"}},
    "required": ["colour", "dark"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colours", "strict": True, "schema": COLOURS}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": COLOURS, **fields}}


def ask(http: httpx.Client, server: Scripted, line: str, **fields: Any) -> dict[str, Any]:
    """The streamed message; the whole one must say the same."""
    server.says(line, line)
    body = {"messages": user("hi"), "max_tokens": 500, **fields}
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    streamed = joined(events(http.post(PATH, json=body | {"stream": True})))
    assert (message["content"] or "") == streamed["content"]
    calls = [each["function"] for each in message.get("tool_calls", ())]
    assert calls == [{"name": each["name"], "arguments": each["arguments"]} for each in streamed["calls"]]
    return streamed


def is_colours(written: str) -> bool:
    value = json.loads(written)
    return (
        set(value) == {"colour", "dark"}
        and value["colour"] in ("red", "blue")
        and value["dark"] in (True, False)
    )


@pytest.mark.parametrize("effort", ["none", "high"])
@pytest.mark.parametrize("line", ["Hello.", "<|START_ACTION|>[]", '{"colour": "green"', ""])
def test_words_keep_to_their_schema(http: httpx.Client, server: Scripted, line: str, effort: str) -> None:
    start = "hm<|END_THINKING|>" if effort == "high" else ""
    message = ask(http, server, start + line, response_format=FORMAT, reasoning_effort=effort)
    assert is_colours(message["content"])
    assert message["reasoning"] == ("hm" if effort == "high" else "")
    assert message["finish_reason"] == "stop"


def test_what_fits_is_left_alone(http: httpx.Client, server: Scripted) -> None:
    said = '{\n  "colour": "blue",\n  "dark": true\n}'
    message = ask(http, server, thinks("Blue?", text(said)), response_format=FORMAT)
    assert (message["reasoning"], message["content"]) == ("Blue?", said)


def test_thoughts_cannot_be_left_but_by_their_end(http: httpx.Client, server: Scripted) -> None:
    line = f"hm<|START_ACTION|>x<|END_OF_TURN_TOKEN|>y<|END_THINKING|>{text('no')}"
    message = ask(http, server, line, response_format=FORMAT)
    assert "<|" not in message["reasoning"]
    assert is_colours(message["content"])


def test_an_answer_cannot_end_inside_a_string(http: httpx.Client, server: Scripted) -> None:
    """The end of the turn is no text, also where a string may have any: "!" is the first that is one."""
    words = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    ended = {"text": f"a{markers.END_OF_TURN}"}
    form = {"type": "json_schema", "json_schema": {"name": "words", "schema": words}}
    message = ask(http, server, thinks("", text(json.dumps(ended))), response_format=form)
    assert json.loads(message["content"]) == {"text": "a!"}
    fields = {"tools": [tool("say", parameters=words)], "tool_choice": "required"}
    [made] = ask(http, server, thinks("", action(call("say", ended))), **fields)["calls"]
    assert json.loads(made["arguments"]) == {"text": "a!"}


def test_json_object(http: httpx.Client, server: Scripted) -> None:
    said = '{"any": [1, {"thing": null}]}'
    message = ask(http, server, thinks("", text(said)), response_format={"type": "json_object"})
    assert message["content"] == said


def test_a_structure_that_the_limit_cuts(http: httpx.Client, server: Scripted) -> None:
    message = ask(http, server, thinks("", text('{"colour": "red"')), response_format=FORMAT, max_tokens=10)
    assert message["finish_reason"] == "length"


@pytest.mark.parametrize(
    "line", [thinks("hm", text("I would rather talk.")), "hm<|END_THINKING|>", thinks("hm")]
)
@pytest.mark.parametrize("effort", ["none", "high"])
def test_required_calls_are_made(http: httpx.Client, server: Scripted, line: str, effort: str) -> None:
    tools = [tool("paint"), tool("wash")]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    message = ask(http, server, line, reasoning_effort=effort, **fields)
    [made] = message["calls"]
    assert made["name"] in ("paint", "wash")
    assert is_colours(made["arguments"])
    assert (message["content"], message["finish_reason"]) == ("", "tool_calls")


def test_several_required_calls(http: httpx.Client, server: Scripted) -> None:
    arguments = {"colour": "red", "dark": False}
    line = thinks("hm", action(call("wash", arguments), call("paint", arguments, 1)))
    message = ask(http, server, line, tools=[tool("paint"), tool("wash")], tool_choice="required")
    assert [each["name"] for each in message["calls"]] == ["wash", "paint"]


def test_a_named_tool_is_called_once(http: httpx.Client, server: Scripted) -> None:
    arguments = {"colour": "red", "dark": False}
    line = thinks("hm", action(call("paint", arguments), call("paint", arguments, 1)))
    choice = {"type": "function", "function": {"name": "wash"}}
    message = ask(http, server, line, tools=[tool("paint"), tool("wash")], tool_choice=choice)
    [made] = message["calls"]
    assert made["name"] == "wash"
    assert is_colours(made["arguments"])


@pytest.mark.parametrize("strict", [True, False])
def test_strict_tools_get_what_they_ask_for(http: httpx.Client, server: Scripted, strict: bool) -> None:
    line = thinks("hm", action(call("paint", {"colour": "green", "dark": 1})))
    [made] = ask(http, server, line, tools=[tool("paint", strict=strict)], parallel_tool_calls=False)["calls"]
    assert is_colours(made["arguments"]) == strict
    if not strict:
        assert json.loads(made["arguments"]) == {"colour": "green", "dark": 1}


def test_words_stay_free_beside_strict_tools(http: httpx.Client, server: Scripted) -> None:
    arguments = {"colour": "red", "dark": False}
    line = thinks("hm", text("First this."), action(call("paint", arguments)))
    message = ask(http, server, line, tools=[tool("paint", strict=True)])
    assert message["content"] == "First this."
    assert json.loads(message["calls"][0]["arguments"]) == arguments


def test_a_format_beside_tools(http: httpx.Client, server: Scripted) -> None:
    fields = {"tools": [tool("paint")], "response_format": FORMAT}
    assert is_colours(ask(http, server, thinks("", text("Hello.")), **fields)["content"])
    line = thinks("", action(call("paint", {"any": "thing"})))
    assert ask(http, server, line, **fields)["calls"][0]["arguments"] == '{"any": "thing"}'


def test_objects_without_names_are_open(http: httpx.Client, server: Scripted) -> None:
    schema = {"type": "object", "properties": {"env": {"type": "object"}, "n": {"$ref": "#/$defs/n"}}}
    schema["$defs"] = {"n": {"type": "integer"}}
    arguments = {"env": {"PATH": "/bin"}, "n": 3}
    line = thinks("", action(call("run", arguments)))
    message = ask(http, server, line, tools=[tool("run", parameters=schema)], tool_choice="required")
    assert json.loads(message["calls"][0]["arguments"]) == arguments


def test_the_other_protocols(http: httpx.Client, server: Scripted) -> None:
    server.says(thinks("", text("Hello.")))
    form = {"type": "json_schema", "name": "colours", "schema": COLOURS, "strict": True}
    answer = http.post("/v1/responses", json={"input": "hi", "text": {"format": form}}).json()
    assert is_colours(answer["output"][-1]["content"][0]["text"])
    server.says(text("Hello."))
    body = {"messages": user("hi"), "max_tokens": 200}
    answer = http.post(
        "/v1/messages", json=body | {"output_config": {"format": {"type": "json_schema", "schema": COLOURS}}}
    ).json()
    assert is_colours(answer["content"][0]["text"])
    server.says(text("Hello."))
    tools = [{"name": "paint", "input_schema": COLOURS}]
    body = {"messages": user("hi"), "max_tokens": 200, "tools": tools, "tool_choice": ANY}
    answer = http.post("/v1/messages", json=body).json()
    assert (answer["content"][0]["name"], answer["stop_reason"]) == ("paint", "tool_use")


def test_strict_tools_in_anthropics_protocol(http: httpx.Client, server: Scripted) -> None:
    server.says(action(call("paint", {"colour": "green"})))
    tools = [{"name": "paint", "input_schema": COLOURS, "strict": True}]
    body = {"messages": user("hi"), "max_tokens": 200, "tools": tools}
    assert is_colours(json.dumps(http.post("/v1/messages", json=body).json()["content"][-1]["input"]))


ANY = {"type": "any", "disable_parallel_tool_use": True}
WRONG = {"type": "object", "properties": {"a": {"type": "strin"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": WRONG}}},
            "response_format.json_schema.schema",
        ),
        (
            {"tools": [tool("paint"), tool("wash", parameters=WRONG)], "tool_choice": "required"},
            "tools[1].function.parameters",
        ),
        ({"tools": [tool("wash", strict=True, parameters=WRONG)]}, "tools[0].function.parameters"),
    ],
)
def test_schemas_that_cannot_be_compiled_are_named(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    error = error_of(http.post(PATH, json={"messages": user("hi"), **fields}), 400)
    assert error["param"] == param
    assert 'Unsupported type "strin"' in error["message"]
    assert ".cc:" not in error["message"]


@pytest.mark.parametrize("strict", [True, False])
def test_what_no_grammar_can_say_is_refused_where_it_is_strict(
    http: httpx.Client, server: Scripted, strict: bool
) -> None:
    """Else it is left out, and the rest is kept to."""
    schema = {**COLOURS, "not": {"properties": {"colour": {"const": "red"}}}}
    body = {"messages": user("hi"), "reasoning_effort": "none", "max_tokens": 200}
    format_ = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": strict}}
    tools = [tool("paint", parameters=schema, strict=strict)]
    if not strict:
        server.says(text('{"colour": "red", "dark": tr'), action(call("paint", {"colour": 5})))
    words = http.post(PATH, json=body | {"response_format": format_})
    named = {"type": "function", "function": {"name": "paint"}}
    calls = http.post(PATH, json=body | {"tools": tools, "tool_choice": named})
    if strict:
        assert '"not" cannot be kept to' in error_of(words, 400)["message"]
        assert error_of(calls, 400)["param"] == "tools[0].function.parameters"
    else:
        assert is_colours(words.json()["choices"][0]["message"]["content"])
        [made] = calls.json()["choices"][0]["message"]["tool_calls"]
        assert is_colours(made["function"]["arguments"])


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"required": ["colour"]}, {"required": ["dark"]}], "properties": COLOURS["properties"]},
        {"not": {"required": ["colour"]}},
        {"description": "whatever"},
    ],
)
def test_arguments_are_objects(http: httpx.Client, server: Scripted, schema: dict[str, Any]) -> None:
    """Whatever the schema says and the compiler makes of it."""
    message = ask(
        http,
        server,
        thinks("", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "paint", "parameters": 1.25'),
        tools=[tool("paint", parameters=schema)],
        tool_choice="required",
    )
    assert message["calls"][0]["arguments"].startswith("{")


def test_a_schema_that_really_takes_long(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes while it is still being compiled, and others are served meanwhile.

    Where threads were stopped for so long that it was compiled by then, another one is tried.
    """
    compiled = threading.Event()
    prepare = grammars.Grammars._prepare

    def watched(*args: Any) -> Any:
        made = prepare(*args)
        compiled.set()
        return made

    monkeypatch.setattr(grammars.Grammars, "_prepare", watched)
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.1)
    word = {"type": "string", "pattern": "^[a-z]{1,50}$"}
    for name in "abcde":
        compiled.clear()
        schema = {"type": "object", "properties": {f"{name}{number}": word for number in range(1000)}}
        form = {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}
        response = http.post(PATH, json={"messages": user("hi"), "response_format": form})
        assert http.post(PATH, json={"messages": user("hi")}).status_code == 200
        if not compiled.is_set():
            break
    else:
        pytest.fail("nobody is served while a schema is being compiled")
    assert "takes more than 0.1 s to compile" in error_of(response, 400)["message"]
    assert compiled.wait(WAIT)  # time was all that it lacked


def asking_for(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": user("hi"), "max_tokens": 200, "response_format": form}


def test_schemas_that_take_long_leave_the_rest_of_the_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: other requests are served, those with a known schema too, and one with a new
    schema is told to come back."""
    go_on = threading.Event()
    with scripted_server() as server, patient.client(server.url) as http:
        assert http.post(PATH, json=asking_for(COLOURS)).status_code == 200
        monkeypatch.setattr(grammars.Grammars, "_prepare", lambda *_: go_on.wait(WAIT))
        monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.1)
        try:
            for number in range(grammars.COMPILERS):
                error = error_of(http.post(PATH, json=asking_for({"const": number})), 400)
                assert error["param"] == "response_format.json_schema.schema"
                assert "smaller" in error["message"]
            for _ in range(40):  # more than any pool has threads here
                response = http.post(PATH, json=asking_for({"const": "new"}))
                assert error_of(response, 429)["code"] == "busy"
            assert response.headers["retry-after"] == "1"
            assert http.post(PATH, json={"messages": user("hi")}).status_code == 200
            assert http.post(PATH, json=asking_for(COLOURS)).status_code == 200
        finally:
            go_on.set()


def test_a_schema_that_takes_long_and_is_sent_again_takes_no_second_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, begun = threading.Event(), []
    prepare = grammars.Grammars._prepare

    def slow(self: Any, structure: Any) -> Any:
        begun.append(structure)
        go_on.wait(WAIT)
        return prepare(self, structure)

    monkeypatch.setattr(grammars.Grammars, "_prepare", slow)
    with scripted_server() as server, patient.client(server.url) as http:
        try:
            monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.1)
            for _ in range(grammars.COMPILERS + 1):
                assert "smaller" in error_of(http.post(PATH, json=asking_for(COLOURS)), 400)["message"]
            assert len(begun) == 1
            [said] = [each.message for each in caplog.records if each.name == grammars.__name__]
            assert "take 1 of the 4 threads" in said
            monkeypatch.setattr(grammars, "COMPILE_SECONDS", WAIT)
        finally:
            go_on.set()
        answer = http.post(PATH, json=asking_for(COLOURS)).json()
        assert is_colours(answer["choices"][0]["message"]["content"])
        assert http.post(PATH, json=asking_for(COLOURS)).status_code == 200
        assert len(begun) <= 2  # a second time where the first was over by then


def test_structures_that_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "CACHE_BYTES", 10)
    known = grammars.Known()

    def make(thinking: bool) -> Any:
        raise NotImplementedError

    made = {name: grammars.Prepared(make, 4) for name in (b"a", b"b", b"c")}
    known.add(b"a", made[b"a"])
    known.add(b"a", made[b"a"])
    known.add(b"b", made[b"b"])
    assert known.get(b"a") is made[b"a"]
    known.add(b"c", made[b"c"])
    assert [known.get(name) for name in (b"a", b"b", b"c")] == [made[b"a"], None, made[b"c"]]
    known.add(b"large", grammars.Prepared(make, 11))
    assert known.get(b"large") is None
    assert known.get(b"c") is made[b"c"]


def test_schemas_that_take_long_do_not_hold_up_the_end_of_the_process() -> None:
    program = (
        "import threading; from headrace.server.structure.workers import Workers; begun = threading.Event();"
        "Workers(1, 'w').submit(lambda: (begun.set(), threading.Event().wait())); begun.wait()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WAIT)


def test_a_backend_that_cannot_is_a_400(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedBackend, "takes_constraints", False)
    error = error_of(http.post(PATH, json={"messages": user("hi"), "response_format": FORMAT}), 400)
    assert "scripted backend" in error["message"]


def test_models_without_a_format_of_their_own() -> None:
    tokenizer = Tokenizer.synthetic(VOCABULARY)
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with scripted_server(tokenizer) as server, patient.client(server.url) as http:
        assert is_colours(ask(http, server, "Hello.", response_format=FORMAT)["content"])
        body = {"messages": user("hi"), "tools": [tool("paint")], "tool_choice": "required"}
        assert error_of(http.post(PATH, json=body), 400)["param"] == "tool_choice"


def test_the_gate_is_red_without_the_mask(
    http: httpx.Client, server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.server.structure.answer.StructuredAnswer.mask", lambda self: None)
    assert ask(http, server, thinks("", text("Hello.")), response_format=FORMAT)["content"] == "Hello."
