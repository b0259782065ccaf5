"""Saved results side by side: ours, and vLLM's in the files of its own benchmark.

A file of ours is what `headrace bench decode --json` writes. Of vLLM's, two kinds are read:

    one engine's run    {"setup": {"vllm": VERSION, ...}, "decode": {"ROWSxCONTEXT": {"ms_per_step": MS,
                        "tok_s": TOKENS_PER_SECOND, "ms_per_step_each": [MS, ...], ...}}}
    several phases'     {"date": ..., "gpu": NAME, "phases": {PHASE: such a run}}

Of phases "own" is taken, in which vLLM routes by the model's own router as we do. A point without
"ms_per_step" was left out or failed, and is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN_ROUTER = "own"  # the phase of a vLLM file that compares with us

Key = tuple[int, int | tuple[int, ...]]  # rows, context


class ResultsError(ValueError):
    """A file that holds no results we can read; the message says which and why."""


@dataclass(frozen=True)
class Speed:
    """Of one point: milliseconds a step, tokens a second of all rows, share of the limit if it is known."""

    milliseconds: float
    tokens_per_second: float
    share: float | None = None


@dataclass(frozen=True)
class Results:
    """What one file says: who was measured on what, and how fast each point was."""

    title: str
    machine: str
    speeds: Mapping[Key, Speed]


def read_results(path: Path, *, phase: str = OWN_ROUTER) -> Results:
    """Raises ResultsError for a file of another kind, or one that cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultsError(f"there is no file {path}") from None
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ResultsError(f"{path} is not JSON: {error}") from None
    try:
        if "points" in content:
            return _ours(content)
        if "phases" in content:
            if phase not in content["phases"]:
                raise ResultsError(f"{path} has no phase {phase!r}, but {', '.join(content['phases'])}")
            return _vllm(content["phases"][phase], machine=str(content.get("gpu", "")))
        if "decode" in content and "setup" in content:
            return _vllm(content, machine="")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ResultsError):
            raise
        raise ResultsError(f"{path} is not a results file as expected: {error!r}") from None
    raise ResultsError(f"{path} holds neither our results nor vLLM's: see headrace/bench/compare.py")


def _ours(content: Mapping[str, Any]) -> Results:
    speeds = {
        _key(point["rows"], point["context"]): Speed(
            point["ms_per_step"], point["tokens_per_s"], point["share_of_limit"]
        )
        for point in content["points"]
    }
    return Results(f"headrace {content['commit'][:7]}", content["machine"], speeds)


def _vllm(run: Mapping[str, Any], machine: str) -> Results:
    speeds = {}
    for name, found in run["decode"].items():
        if "ms_per_step" in found:
            rows, context = (int(part) for part in name.split("x"))
            speeds[_key(rows, context)] = Speed(found["ms_per_step"], found["tok_s"])
    return Results(f"vLLM {run['setup']['vllm']}", machine.split(",")[0], speeds)


def _key(rows: int, context: int | Sequence[int]) -> Key:
    return rows, context if isinstance(context, int) else tuple(context)


def merged(points: Sequence[Mapping[str, Any]], vllm: Results) -> list[dict[str, Any]]:
    """The points of a file of ours, with vLLM's tokens a second where it was measured at the same point."""
    found = [vllm.speeds.get(_key(point["rows"], point["context"])) for point in points]
    return [
        {**point, "vllm_tokens_per_s": None if speed is None else round(speed.tokens_per_second, 1)}
        for point, speed in zip(points, found, strict=True)
    ]


def keys_of(results: Sequence[Results]) -> list[Key]:
    """All points of any file, in the order in which they first come."""
    return list(dict.fromkeys(key for one in results for key in one.speeds))
