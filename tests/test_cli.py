"""The command line, in process; one test runs it as a user does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app, console
from headrace.cli.chat import _speak
from headrace.cli.info import Machine, _verdict, size
from headrace.cli.options import EngineFlags, parse_size
from headrace.client import Client, Piece
from headrace.engine.engine import Engine
from headrace.engine.interpreter import SWITCH_INTERVAL
from headrace.engine.options import EngineOptions
from tests.server.scripted import REPLY, Scripted, scripted_server
from tests.waiting import WAIT, comes

SYNTHETIC = ["--synthetic", "north-micro-shape", "--max-context", "1024", "--max-sequences", "2"]


def headrace(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_help_of_every_command() -> None:
    listed = headrace("--help").output
    for command in ("serve", "chat", "generate", "info"):
        assert command in listed
        own = headrace(command, "--help")
        assert own.exit_code == 0
        assert "Example:" in own.output
        assert "--synthetic" in own.output


def test_version() -> None:
    assert headrace("--version").output == "headrace 0.1.0\n"


def test_defaults_are_those_of_the_engine() -> None:
    assert EngineFlags().options() == EngineOptions()
    assert EngineFlags().options().prefix_cache


def test_unpacked_layers_are_a_number_or_chosen() -> None:
    for text, number in (("auto", None), ("0", 0), ("24", 24)):
        assert EngineFlags(unpacked_layers=text).options().unpacked_layers == number


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "give one model: either a MODEL or --synthetic NAME"),
        (["generate", *SYNTHETIC, "\udcff"], "the text is not valid Unicode"),  # a byte that is not UTF-8
        (["serve", "nowhere"], "there is no model at 'nowhere': give a Hugging Face folder"),
        (
            ["serve", "CohereLabs/North-Mini-Code-1.0"],
            "`hf download CohereLabs/North-Mini-Code-1.0 --local-dir North-Mini-Code-1.0`",
        ),
        (["serve", "smollm2", "--max-sequences", "0"], "--max-sequences is 0; give a whole number from 1 up"),
        (["serve", "smollm2", "--keep-alive", "-1"], "--keep-alive is -1.0; give seconds, or 0 for never"),
        (["serve", "smollm2", "--api-key", ""], "--api-key is empty; give a key"),
        (
            ["serve", "smollm2", "--decode", "magic"],
            "--decode 'magic' is not a backend; choose one of: auto, kernel, torch",
        ),
        (
            ["generate", *SYNTHETIC, "hi", "--decode", "kernel", "--device", "cpu"],
            "--decode kernel cannot decode here: it runs on a Hopper GPU only",
        ),
        (
            ["serve", "smollm2", "--unpacked-layers", "most"],
            "--unpacked-layers 'most' is not a number: write auto, or one like 24",
        ),
        (
            ["serve", "smollm2", "--unpacked-layers", "-1"],
            "--unpacked-layers is -1; give a whole number from 0 up",
        ),
        (
            ["serve", *SYNTHETIC, "--unpacked-layers", "1", "--device", "cpu", "--port", "0"],
            "--unpacked-layers is 1, but weights are packed only for the decode kernel",
        ),
        (["serve", "smollm2", "--kv-memory", "lots"], "--kv-memory 'lots' is not a size: write it like 512M"),
        (["serve", "smollm2", "--port", "70000"], "port 70000 does not exist"),
        (["serve", "smollm2", "--device", "tpu"], "choose auto, cpu or cuda"),
        (["serve", "--synthetic", "x", "--dtype", "int1"], "choose auto, bfloat16 or float32"),
        (["generate", "--synthetic", "gpt-9", "hi"], "there is no shape called 'gpt-9': choose one of"),
        (
            ["generate", "smollm2", "hi", "--temperature", "-1"],
            "--temperature must be a number from 0 to 1000, not -1.0",
        ),
        (["generate", "smollm2", "hi", "--max-tokens", "0"], "--max-tokens must be 1 or more, not 0"),
        (["generate", *SYNTHETIC, "hi", "--kv-memory", "1K"], "--kv-memory"),
        (["generate", *SYNTHETIC, "x" * 2000], "maximum context length is 1024 tokens"),
        (["chat", "smollm2", "--url", "http://127.0.0.1:1"], "either a model to load or the --url"),
        (["chat", "--url", "localhost:8000"], "give one like http://127.0.0.1:8000"),
        (["chat", "--url", "http://127.0.0.1:1"], "cannot reach a server at http://127.0.0.1:1"),
        (["info"], "give either a MODEL or --synthetic with one of: north-mini-code"),
        (["info", "smollm2", "--synthetic", "north-mini-code"], "give either a MODEL or --synthetic"),
    ],
)
def test_refusals_are_one_sentence_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = headrace(*arguments, stdin="")
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("headrace: ")  # no empty line of progress bars
    assert result.stdout == ""


def test_generate_streams_to_stdout_and_says_the_rate_on_stderr() -> None:
    first = headrace("generate", *SYNTHETIC, "def f(", "--max-tokens", "3", "--seed", "1")
    assert first.exit_code == 0
    assert first.stdout.strip()
    assert "3 tokens in" in first.stderr
    piped = headrace("generate", *SYNTHETIC, "--max-tokens", "3", "--seed", "1", stdin="def f(")
    assert piped.stdout == first.stdout


def test_generate_needs_a_prompt() -> None:
    result = headrace("generate", *SYNTHETIC, stdin="")
    assert result.exit_code == 2
    assert "the prompt is empty" in result.stderr


def test_chat_in_this_process() -> None:
    result = headrace("chat", *SYNTHETIC, "--max-tokens", "2", stdin="hi\n/what\n/reset\nhi\n/exit\n")
    assert result.exit_code == 0
    assert result.stderr.count("2 tokens in") == 2
    assert "The conversation is forgotten." in result.stderr
    assert result.stderr.count("/reset forgets") == 2


@pytest.fixture(scope="module")
def server() -> Generator[Scripted, None, None]:
    with scripted_server() as running:
        yield running


def test_chat_with_a_server(server: Scripted) -> None:
    result = headrace("chat", "--url", server.url, "--system", "Be brief.", stdin="hi\nsay {[b]ünd[/b]}\n")
    assert result.exit_code == 0
    assert REPLY in result.stdout
    assert "[b]ünd[/b]" in result.stdout  # not taken as markup
    prompts = [server.tokenizer.decode(request.prompt) for request in server.engine.submitted[-2:]]
    assert all("Be brief." in prompt for prompt in prompts)
    assert prompts[1].index(REPLY) > prompts[1].index("hi")  # the second turn knows the first


def test_chat_with_a_server_that_asks_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    with scripted_server(served={"api_keys": ("sesame", "other")}) as server:
        refused = headrace("chat", "--url", server.url, stdin="hi\n")
        assert refused.exit_code == 2
        assert "No valid API key" in refused.stderr
        assert "--api-key" in refused.stderr
        assert REPLY in headrace("chat", "--url", server.url, "--api-key", "other", stdin="hi\n").stdout
        monkeypatch.setenv("HEADRACE_API_KEY", "sesame other")  # as the server takes it
        assert REPLY in headrace("chat", "--url", server.url, stdin="hi\n").stdout


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def interrupted(messages: object) -> Generator[Piece, None, None]:
        try:
            yield Piece("Well, ")
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    assert _speak(interrupted, []) == {"role": "assistant", "content": "Well, "}
    assert closed == [True]
    assert "Stopped." in capsys.readouterr().err


def test_info_reads_no_weights() -> None:
    result = headrace("info", "--synthetic", "north-mini-code", "--context", "32768", "--dtype", "bfloat16")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    # The figures are those of the model's public description: 30.48 B parameters, 56.78 GiB in bfloat16, and
    # 26,624 bytes of KV a token in the full layers.
    for expected in (
        "30,484,303,872",
        "56.78 GiB in bfloat16",
        "26.00 KiB",
        "128 experts, top 8",
        "cohere2_moe",
    ):
        assert expected in text


SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}


def test_info_of_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / ("long-name-" * 12)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    result = headrace("info", str(folder), "--device", "cpu")
    assert str(folder) in "".join(result.stdout.split()), "a path that is cut off is of no use"
    text = " ".join(result.stdout.split())
    assert "llama" in text
    assert "134.5 M" in text
    assert "Decode backend torch" in text
    assert "Hopper GPU no" in text


def test_verdicts() -> None:
    machine = Machine("H200", memory=1000, free=500, is_hopper=True)
    assert _verdict(machine, needed=500, weights=400) == "yes"
    assert "given back" in _verdict(machine, needed=900, weights=400)
    assert "shorter context" in _verdict(machine, needed=1100, weights=400)
    assert _verdict(machine, needed=2000, weights=1900).startswith("no")


def test_sizes() -> None:
    assert [size(number) for number in (5, 2048, 3 * 2**30, 2**45)] == [
        "5 B",
        "2.00 KiB",
        "3.00 GiB",
        "32768.00 GiB",
    ]
    assert [parse_size(text) for text in (None, "10", "2K", "1.5g", "4GiB", "3 MB")] == [
        None,
        10,
        2048,
        3 * 2**29,
        2**32,
        3 * 2**20,
    ]


class Said:
    """What a process has written to a stream so far."""

    def __init__(self, stream: IO[str] | None) -> None:
        assert stream is not None
        self._stream = stream
        self.text = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Read on until this is in it; AssertionError if it ends before."""
        while not (found := re.search(pattern, self.text)):
            line = self._stream.readline()
            assert line, self.text
            self.text += line
        return found

    def all(self) -> str:
        return self.text + self._stream.read()


@contextlib.contextmanager
def served() -> Iterator[tuple[subprocess.Popen[str], Said, Client]]:
    """`headrace serve` as a user runs it, once it listens. An answer that fills its context takes long."""
    command = [sys.executable, "-m", "headrace.cli", "serve", "--synthetic", "north-micro-shape"]
    command += ["--served-name", "tiny", "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            said = Said(process.stderr)
            url = said.until(r"Serving\s+tiny\s+at\s+(http://127\.0\.0\.1:\d+)/v1")[1]
            yield process, said, Client(url)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def test_serve_as_a_user_runs_it() -> None:
    with served() as (process, said, client):
        assert client.is_healthy()
        assert client.model() == "tiny"
        pieces = list(client.chat([{"role": "user", "content": "hi"}], max_tokens=3, ignore_eos=True))
        assert pieces[-1].completion_tokens == 3
        taken = headrace("serve", *SYNTHETIC, "--port", client.url.rpartition(":")[2])
        assert taken.exit_code == 2
        assert "give another --port or --host" in taken.stderr.replace("\n", " ")
        endless = client.chat([{"role": "user", "content": "hi"}], ignore_eos=True)
        next(endless)
        endless.close()
        said.until(r"(?s)(/v1/chat/completions.*cancelled=\w+\n.*){2}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 0
        text = said.all()
        assert "Traceback" not in text
        [ended, left] = [line for line in text.splitlines() if "path=/v1/chat/completions" in line]
        assert " INFO headrace.server.request_log: id=req_" in ended
        assert "completion_tokens=3" in ended
        assert ended.endswith("cancelled=false")
        assert left.endswith("cancelled=true")


def test_standard_input_that_is_no_text_is_refused() -> None:
    result = CliRunner().invoke(app, ["generate", "smollm2"], input=b"\xff")
    assert result.exit_code == 2
    assert "standard input is no text: 'utf-8' codec can't decode byte 0xff" in result.stderr


def test_who_is_in_a_hurry_ends_a_server_by_two_signals_without_a_traceback() -> None:
    with served() as (process, said, client):
        endless = client.chat([{"role": "user", "content": "hi"}], ignore_eos=True)
        next(endless)
        process.send_signal(signal.SIGINT)
        assert comes(lambda: not client.is_healthy())
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 0
        text = said.all()
        assert "Traceback" not in text
        assert "error=shutdown" in text


def test_a_server_has_rehearsed_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(Engine, "rehearse", lambda self: done.append("rehearsed"))
    monkeypatch.setattr("headrace.server.run", lambda *_, **__: done.append("listens"))
    monkeypatch.setattr(console, "configure_server_logging", lambda **_: None)
    assert headrace("serve", *SYNTHETIC, "--port", "0").exit_code == 0
    assert done == ["rehearsed", "listens"]


def test_a_server_has_the_interpreter_settled_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr("headrace.server.run", lambda *_, **__: seen.append(sys.getswitchinterval()))
    monkeypatch.setattr(console, "configure_server_logging", lambda **_: None)
    before = sys.getswitchinterval()
    assert headrace("serve", *SYNTHETIC, "--port", "0").exit_code == 0
    assert seen == [pytest.approx(SWITCH_INTERVAL)]
    assert sys.getswitchinterval() == before


def test_the_module_imports_no_torch_for_help() -> None:
    code = (
        "import sys, headrace.cli; from typer.testing import CliRunner;"
        "CliRunner().invoke(headrace.cli.app, ['serve', '--help']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
