"""A checkpoint's chat template is a program from elsewhere: it gets the conversation, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import SandboxedEnvironment

from headrace.load import resolve
from headrace.model.tokenizer import ChatTemplateError, Tokenizer
from tests.server import patient
from tests.server.scripted import scripted_server
from tests.server.test_unusable import CHAT, MESSAGES, RESPONSES, body

# Each gives, outside a sandbox, something that `REACHED` names.
ESCAPES = {
    "subclasses": "{{ messages.__class__.__base__.__subclasses__() }}",
    "by subscript": "{{ ''['__class__']['__mro__'][-1]['__subclasses__']() }}",
    "by filter": "{{ ((messages|attr('__class__'))|attr('__base__'))|attr('__subclasses__')() }}",
    "globals": "{{ cycler.__init__.__globals__['os'].environ }}",
    "format": "{{ '{0.__class__.__base__.__subclasses__}'.format(messages) }}",
}
REACHED = ("<class ", "environ(", "built-in method")
LIST = {"messages": [{"role": "user", "content": "hi"}]}


def tokenizer(template: str, folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint that has this template, written to `folder`."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("north-micro") / name, folder)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_pretrained(folder)


def reaches(text: str) -> bool:
    return any(sign in text for sign in REACHED)


@pytest.mark.parametrize("template", ESCAPES.values(), ids=ESCAPES)
def test_a_template_does_not_leave_its_sandbox(tmp_path: Path, template: str) -> None:
    assert reaches(jinja2.Environment().from_string(template).render(**LIST))  # it would
    with pytest.raises(ChatTemplateError, match="cannot render this conversation") as caught:
        tokenizer(template, tmp_path).render_chat(LIST["messages"])
    assert not reaches(str(caught.value))


def test_the_gate_is_red_without_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SandboxedEnvironment, "is_safe_attribute", lambda *_: True)
    template = "{# not rendered before #}" + ESCAPES["subclasses"]
    assert reaches(tokenizer(template, tmp_path).render_chat(LIST["messages"]))


def test_a_template_does_not_change_the_conversation(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render"):
        tokenizer("{{ messages.append(1) }}", tmp_path).render_chat(LIST["messages"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_the_client_is_told_in_its_protocols_words(tmp_path: Path, path: str, stream: bool) -> None:
    with scripted_server(tokenizer(ESCAPES["subclasses"], tmp_path)) as server:
        response = patient.post(server.url + path, json=body(path, "hi", stream=stream))
        assert response.status_code == 400
        answer: dict[str, Any] = response.json()
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer.get("type") == ("error" if path == MESSAGES else None)
        assert "chat template cannot render" in answer["error"]["message"]
        assert not reaches(response.text)
        assert not server.engine.submitted
