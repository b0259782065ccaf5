"""`make demo`: serve a real model, ask it a question over HTTP, print the answer as it streams in.

    python tools/demo.py [--model smollm2] [--question "..."]

Ends with 0 only if the server started, answered, and stopped when it was asked to.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.client import Client, ServerError

QUESTION = "Explain in two sentences why the sky is blue."
START_SECONDS = 300
STOP_SECONDS = 30


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve a model and ask it a question.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-tokens", type=int, default=120)
    arguments = parser.parse_args()

    with free_port() as port:
        # A small engine: the demo's one question needs no room for more, and starts sooner without.
        options = ["--port", str(port), "--max-sequences", "4", "--max-context", "2048"]
        command = [sys.executable, "-m", "headrace.cli", "serve", arguments.model, *options]
        say(f"$ headrace serve {arguments.model} {' '.join(options)}")
        # The keys of another server of the user's are not for this one: it would ask the demo for one.
        environment = {name: value for name, value in os.environ.items() if name != "HEADRACE_API_KEY"}
        server = subprocess.Popen(command, env=environment)
        try:
            client = Client(f"http://127.0.0.1:{port}")
            wait_until_healthy(client, server)
            ask(client, arguments.question, arguments.max_tokens)
        except (DemoError, ServerError) as error:
            say(f"The demo failed: {error}")
            return 1
        finally:
            clean = stop(server)
    if not clean:
        say(f"The demo failed: the server did not stop cleanly (exit code {server.returncode})")
    return 0 if clean else 1


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why."""


@contextmanager
def free_port() -> Iterator[int]:
    """A port for a server that is to be started. On Linux nobody else is given it meanwhile."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = int(kept.getsockname()[1])
        if sys.platform != "linux":
            kept.close()  # it would keep the server out as well
        yield port


def wait_until_healthy(client: Client, server: subprocess.Popen[bytes]) -> None:
    """Poll /health until it answers. Raises DemoError if the server ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not client.is_healthy():
        if server.poll() is not None:
            raise DemoError(f"the server ended with exit code {server.returncode} before it answered")
        if time.monotonic() > deadline:
            raise DemoError(f"the server was not ready after {START_SECONDS} seconds")
        time.sleep(0.2)


def ask(client: Client, question: str, max_tokens: int) -> None:
    """Print the answer to one question as it arrives, and how fast it came."""
    say(f"\nPOST {client.url}/v1/chat/completions\n> {question}\n")
    start = time.monotonic()
    first: float | None = None
    tokens = 0
    messages = [{"role": "user", "content": question}]
    for piece in client.chat(messages, model=client.model(), temperature=0, max_tokens=max_tokens):
        if piece.text and first is None:
            first = time.monotonic()
        print(piece.text, end="", flush=True)
        tokens = piece.completion_tokens or tokens
    if first is None:
        raise DemoError("the server answered with no text")
    seconds = time.monotonic() - first
    rate = f"{(tokens - 1) / seconds:.1f} tokens/s" if tokens > 1 else "one token"
    say(f"\n\n{tokens} tokens, the first after {first - start:.2f} s, then {rate}")


def stop(server: subprocess.Popen[bytes]) -> bool:
    """Ask the server to end. True if it did so by itself, with exit code 0."""
    server.send_signal(signal.SIGTERM)
    try:
        return server.wait(STOP_SECONDS) == 0
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        return False


def say(text: str) -> None:
    """Print a line. It goes out whole: the server writes to the same terminal."""
    print(f"{text}\n", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
