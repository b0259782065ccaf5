"""What `make bench` measures: the host's time a step, and tokens per second of the real models here.

Host time: the engine with a backend that computes nothing, so that schedule and postprocess (detokenisation
included) are all there is. Writes benchmarks/results/host-<machine>.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace import LLM, SamplingParams
from headrace.bench.results import origin, write
from headrace.engine.build import assemble_engine
from headrace.engine.engine import Engine
from headrace.engine.null_backend import NullBackend
from headrace.engine.options import EngineOptions
from headrace.engine.request import Output
from headrace.load import resolve
from headrace.model.config import KVGroup
from headrace.model.kv import blocks_for
from headrace.model.presets import PRESETS
from headrace.model.tokenizer import Tokenizer

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
ROWS = 16
CONTEXT = 8192
PROMPT = "Write a Python function that returns the n-th Fibonacci number, with a docstring."


@dataclass(frozen=True)
class HostTime:
    """Medians over the steps of one run, in microseconds a step."""

    steps_per_call: int
    schedule_us: float
    postprocess_us: float
    total_us: float


def host_engine(steps_per_call: int) -> Engine:
    """North's configuration over a null backend, with room for ROWS sequences of CONTEXT tokens."""
    config = PRESETS["north-mini-code"]
    tokenizer = Tokenizer.from_pretrained(resolve("smollm2"))
    options = EngineOptions(max_sequences=ROWS, steps=steps_per_call, prefill_chunk=CONTEXT)
    backend = NullBackend(vocab_size=tokenizer.vocab_size, max_rows=ROWS, max_steps=steps_per_call)
    return assemble_engine(
        backend=backend,
        prefiller=backend,
        tokenizer=tokenizer,
        config=config,
        sizes=dict.fromkeys(KVGroup, 2 * ROWS * blocks_for(CONTEXT)),
        max_context=CONTEXT,
        options=options,
    )


def measure_host(steps_per_call: int, *, calls: int = 400) -> HostTime:
    """Time schedule (with reclaim) and postprocess of ROWS decoding rows, a step."""
    engine = host_engine(steps_per_call)
    made: list[Output] = []
    tokens = calls * steps_per_call + 64
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for _ in range(ROWS):
        engine.submit(range(CONTEXT - tokens), params, made.append)
    while len(made) < ROWS:
        engine.step()
    schedule: list[float] = []
    postprocess: list[float] = []
    for _ in range(calls):
        start = time.perf_counter()
        plan = engine.schedule()
        schedule.append(time.perf_counter() - start)
        for sampled in engine.run(plan):
            start = time.perf_counter()
            engine.postprocess(plan, sampled)
            postprocess.append(time.perf_counter() - start)
        start = time.perf_counter()
        engine.reclaim()
        schedule[-1] += time.perf_counter() - start
    a_step = 1e6 / steps_per_call
    scheduled, processed = statistics.median(schedule) * a_step, statistics.median(postprocess) * 1e6
    return HostTime(steps_per_call, round(scheduled, 1), round(processed, 1), round(scheduled + processed, 1))


def measure_model(name: str, *, rows: int, tokens: int) -> float:
    """Tokens per second of `rows` greedy answers of `tokens` tokens each, prompts included in the time."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with LLM(name, max_sequences=rows, max_context=1024) as llm:
        llm.generate([PROMPT] * rows, SamplingParams(temperature=0, max_tokens=4))
        start = time.perf_counter()
        llm.generate([PROMPT] * rows, params)
        return rows * tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host-only", action="store_true", help="leave the real models out")
    parser.add_argument("--models", nargs="*", default=["smollm2", "north-micro"], help="what to run")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()

    host = [measure_host(steps) for steps in (1, 16)]
    print(
        f"{'steps/call':>10} {'schedule us':>12} {'postprocess us':>15} {'sum us/step':>12}   ({ROWS} rows)"
    )
    for row in host:
        print(f"{row.steps_per_call:10} {row.schedule_us:12} {row.postprocess_us:15} {row.total_us:12}")
    models = []
    for name in [] if arguments.host_only else arguments.models:
        for rows in (1, 8):
            speed = measure_model(name, rows=rows, tokens=arguments.tokens)
            models.append({"model": name, "rows": rows, "tokens_per_s": round(speed, 1)})
            print(f"{name:>14} {rows:3} rows {speed:8.1f} tokens/s")
    result = {
        **origin(" ".join(["python", *sys.argv])),
        "host": [row.__dict__ for row in host],
        "models": models,
    }
    path = arguments.output or RESULTS / f"host-{'h200' if torch.cuda.is_available() else 'cpu'}.json"
    write(path, result)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
