"""`make demo` with the real model, as a user runs it."""

from __future__ import annotations

import io
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.server.app import ServerOptions, bind
from tools.demo import free_port, say

DEMO = Path(__file__).parent.parent.parent / "tools" / "demo.py"


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, DEMO, *arguments], capture_output=True, text=True, check=False)


def test_smollm2_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "of another server")
    result = demo("--max-tokens", "8", "--question", "What is the capital of France?")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "The capital of France is Paris" in result.stdout
    assert re.search(r"8 tokens, the first after [\d.]+ s, then [\d.]+ tokens/s", result.stdout)


def test_failure_is_an_exit_code() -> None:
    result = demo("--model", "nowhere")
    assert result.returncode == 1
    assert "the server ended with exit code 2" in result.stdout
    assert "there is no model at 'nowhere'" in " ".join(result.stderr.split())


def test_a_line_goes_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server writes to the same terminal, and its lines must not begin in the middle of ours."""
    writes: list[str] = []

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Terminal())
    say("91 tokens")
    assert [text for text in writes if text] == ["91 tokens\n"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port that is kept is kept from all")
def test_a_port_is_kept_for_the_server() -> None:
    with free_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with bind(ServerOptions(port=port)) as server:
            server.listen()
            socket.create_connection(("127.0.0.1", port)).close()
