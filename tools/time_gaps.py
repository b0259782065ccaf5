"""Times what a long prompt does to those who are already answered: the gaps between their tokens.

Against a server that runs (`headrace serve`): some streams decode; then a long prompt arrives; the gaps
between tokens of the streams before it and while it is computed, and what is left of their throughput
meanwhile. Prompts are random tokens, answers are not ended by the model.

    python -m tools.time_gaps --url http://127.0.0.1:8000 --streams 4 --long 100000 --json gaps.json
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.bench.results import origin, write


class GapError(RuntimeError):
    """The server refused, or a stream ended before the long prompt was computed."""


@dataclass(frozen=True)
class Gaps:
    """Milliseconds between tokens of one stream: in the middle, at the 99th percentile, and the longest."""

    count: int
    middle: float
    percentile_99: float
    longest: float
    tokens_per_second: float  # of all streams together


def gaps_of(arrivals: Sequence[Sequence[float]], begin: float, end: float) -> Gaps:
    """The gaps that end within [begin, end), of several streams whose tokens arrived at these seconds.

    Raises GapError if there are none.
    """
    lengths = sorted(
        (after - before) * 1e3
        for times in arrivals
        for before, after in itertools.pairwise(times)
        if begin <= after < end
    )
    if not lengths:
        raise GapError("no stream was running at that time: ask for longer answers (--tokens)")
    made = sum(begin <= at < end for times in arrivals for at in times)
    last = len(lengths) - 1
    return Gaps(
        len(lengths),
        lengths[last // 2],
        lengths[min(last, int(0.99 * len(lengths)))],
        lengths[last],
        made / (end - begin),
    )


class Stream(threading.Thread):
    """A completion whose tokens' times of arrival are kept."""

    def __init__(self, url: str, prompt: list[int], tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self._prompt, self._tokens = url, prompt, tokens
        self.asked = time.monotonic()
        self.arrivals: list[float] = []
        self.problem: str | None = None

    def run(self) -> None:
        body = {"prompt": self._prompt, "max_tokens": self._tokens, "temperature": 0}
        try:
            for event in events(self._url, body | {"stream": True, "ignore_eos": True}):
                if event["choices"]:
                    self.arrivals.append(time.monotonic())
        except (OSError, GapError) as problem:
            self.problem = str(problem)


def events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed completion. Raises GapError with the server's words if it refuses."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise GapError(response.read().decode(errors="replace"))
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def measure(
    url: str, *, streams: int, tokens: int, long: int, vocabulary: int, quiet: float
) -> dict[str, Any]:
    """Gaps `before` and `during` a prompt of `long` tokens, which comes after `quiet` seconds."""
    generator = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [generator.randrange(10, vocabulary) for _ in range(length)]

    running = [Stream(url, prompt(64), tokens) for _ in range(streams)]
    for stream in running:
        stream.start()
    while not all(stream.arrivals or stream.problem for stream in running):
        time.sleep(0.01)
    begun = time.monotonic()
    time.sleep(quiet)
    late = Stream(url, prompt(long), 1)
    late.start()
    late.join()
    for problem in (stream.problem for stream in [late, *running]):
        if problem is not None:
            raise GapError(problem)
    arrivals = [list(stream.arrivals) for stream in running]
    end = late.arrivals[0]
    return {
        "streams": streams,
        "long_prompt": long,
        "seconds": end - late.asked,
        "before": asdict(gaps_of(arrivals, begun, late.asked)),
        "during": asdict(gaps_of(arrivals, late.asked, end)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of each stream's answer, at most")
    parser.add_argument("--long", type=int, default=131_000, help="tokens of the long prompt")
    parser.add_argument("--vocabulary", type=int, default=4000, help="prompts have tokens below this")
    parser.add_argument("--quiet", type=float, default=2.0, help="seconds before the long prompt")
    parser.add_argument("--json", type=Path)
    options = vars(parser.parse_args())
    file: Path | None = options.pop("json")
    url = options.pop("url")
    try:
        found = measure(url, **options)
    except GapError as error:
        sys.exit(f"Nothing was measured at {url}: {error}")
    for when in ("before", "during"):
        one = found[when]
        print(
            f"{when}: {one['middle']:.1f} ms between tokens, 99 % below {one['percentile_99']:.1f}, "
            f"at most {one['longest']:.1f}; {one['tokens_per_second']:.0f} tokens/s in all"
        )
    print(f"the prompt of {found['long_prompt']} tokens took {found['seconds']:.2f} s")
    if file is not None:
        write(file, origin() | found)


if __name__ == "__main__":
    main()
