"""Trees side by side, with small packages in headrace's place whose bench says what it is told to."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.compare_trees import main

BENCH = """\
import json, os, sys
from pathlib import Path

tree = Path(__file__).parents[1]
log = tree.parent / "log"
asked = [part for part in sys.argv[1:] if not part.startswith("--json=")]
with log.open("a") as lines:
    print(tree.name, *asked, file=lines)
rounds = sum(line.split()[0] == tree.name for line in log.read_text().splitlines())
[saved] = [part.removeprefix("--json=") for part in sys.argv if part.startswith("--json=")]

def measure(points):
    commit = os.environ.get("HEADRACE_COMMIT", tree.name)
    content = {"machine": "a GPU", "commit": commit, "points": points}
    Path(saved).write_text(json.dumps(content))

def found(rows, context, times, **others):
    ms = times[rounds - 1]
    point = {"rows": rows, "context": context, "ms_per_step": ms, "tokens_per_s": rows / ms * 1e3}
    return point | {"share_of_limit": 1.6 / ms} | others

"""
BASE = "measure([found(1, 8192, [2.0, 2.0, 2.0])])"
FASTER = "measure([found(1, 8192, [1.8, 1.9, 1.85])])"


def tree(folder: Path, name: str, body: str) -> str:
    """A tree as it is named on the command line; `body` is what its bench does."""
    package = folder / name / "headrace"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "cli.py").write_text(BENCH + body + "\n")
    return f"{name}={folder / name}"


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def cells(printed: str) -> dict[tuple[str, str], list[str]]:
    """Of every line of the table behind its heads, by point and tree."""
    heads, *lines = printed.splitlines()
    assert heads.split()[:2] == ["point", "tree"]
    return {(parts[0], parts[1]): parts[2:] for parts in map(str.split, lines)}


def test_order_is_reversed_from_round_to_round(tmp_path: Path) -> None:
    trees = [tree(tmp_path, name, BASE) for name in ("a", "b", "c")]
    assert main([*trees, "--rounds", "3", "--points", "1x8K", "2x1K..8K", "--options=--launches 9"]) == 0
    assert [line.split()[0] for line in log(tmp_path)] == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert {line.split(maxsplit=1)[1] for line in log(tmp_path)} == {
        "bench decode --launches 9 --point=1x8K --point=2x1K..8K"
    }


def test_ratios_are_of_the_same_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = "measure([found(1, 8192, [2.0, 2.5]), found(2, [1024, 8192], [4.0, 8.0])])"
    other = "measure([found(1, 8192, [1.8, 2.0]), found(2, [1024, 8192], [5.0, 6.0])])"
    trees = [tree(tmp_path, "base", base), tree(tmp_path, "other", other)]
    assert main([*trees, "--rounds", "2", "--points", "1x8K", "2x1K..8K"]) == 0
    assert cells(capsys.readouterr().out) == {
        ("1x8K", "base"): ["2.000", "2.500", "2.250", "72.0%"],
        ("1x8K", "other"): ["1.800", "2.000", "1.900", "0.850", "0.800..0.900", "84.4%"],
        ("2x1K..8K", "base"): ["4.000", "8.000", "6.000", "30.0%"],
        ("2x1K..8K", "other"): ["5.000", "6.000", "5.500", "~1.000", "0.750..1.250", "29.3%"],
    }


def test_one_round_tells_nothing_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees = [tree(tmp_path, "base", BASE), tree(tmp_path, "other", FASTER)]
    assert main([*trees, "--rounds", "1", "--points", "1x8K"]) == 0
    assert cells(capsys.readouterr().out)["1x8K", "other"][2] == "~0.900"


def test_clock_and_power_where_they_are_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    power = "sm_clock_mhz=1900 - rounds, power_w=600.0 + rounds, power_limited=rounds == 2"
    unknown = "sm_clock_mhz=None, power_w=None, power_limited=None"
    trees = [
        tree(tmp_path, "base", f"measure([found(1, 8192, [2.0] * 3, {power})])"),
        tree(tmp_path, "other", f"measure([found(1, 8192, [2.0] * 3, {unknown})])"),
    ]
    assert main([*trees, "--rounds", "3", "--points", "1x8K"]) == 0
    found = cells(capsys.readouterr().out)
    assert found["1x8K", "base"][-3:] == ["80.0%", "1898", "*602"]
    assert found["1x8K", "other"][-1] == "80.0%"


def test_every_run_is_kept_by_the_code_of_its_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_COMMIT", "that of the tool's own tree")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the working directory is then no place to look in
    trees = [tree(tmp_path, "base", BASE), tree(tmp_path, "other", FASTER)]
    path = tmp_path / "ab.json"
    assert main([*trees, "--rounds", "2", "--points", "1x8K", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["trees"] == {name: str(tmp_path / name) for name in ("base", "other")}
    assert [(run["round"], run["tree"], run["results"]["commit"]) for run in content["runs"]] == [
        (1, "base", "base"),
        (1, "other", "other"),
        (2, "other", "other"),
        (2, "base", "base"),
    ]
    times = [run["results"]["points"][0]["ms_per_step"] for run in content["runs"]]
    assert times == [2.0, 1.8, 1.9, 2.0]
    assert {run["failure"] for run in content["runs"]} == {""}


def test_a_tree_that_fails_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = "sys.exit('headrace: the kernel does not compile:\\nring.h(7): error')"
    trees = [
        tree(tmp_path, "base", BASE),
        tree(tmp_path, "broken", broken),
        tree(tmp_path, "silent", ""),
        tree(tmp_path, "later", f"{FASTER}\nif rounds == 2: sys.exit('out of luck')"),
        tree(tmp_path, "other", FASTER),
    ]
    path = tmp_path / "ab.json"
    assert main([*trees, "--rounds", "3", "--points", "1x8K", "--json", str(path)]) == 1
    ran = [line.split()[0] for line in log(tmp_path)]
    assert ran == ["base", "broken", "silent", "later", "other", "other", "later", "base", "base", "other"]
    printed, told = capsys.readouterr()
    found = cells(printed)
    assert found["1x8K", "broken"] == found["1x8K", "silent"] == ["-", "-", "-", "failed"]
    assert found["1x8K", "later"][:5] == ["1.800", "1.900", "-", "1.850", "0.925"]
    assert found["1x8K", "other"][3:6] == ["1.850", "0.925", "0.900..0.950"]
    assert "broken: left out from here on: its bench ended with 1\n" in told
    assert "ring.h(7): error" in told
    assert "silent: left out from here on: its bench left no results: there is no file" in told
    failed = {run["tree"] for run in json.loads(path.read_text())["runs"] if run["failure"]}
    assert failed == {"broken", "silent", "later"}


def test_without_the_first_tree_there_are_times_but_no_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = [tree(tmp_path, "base", "sys.exit(3)"), tree(tmp_path, "other", FASTER)]
    assert main([*trees, "--rounds", "2", "--points", "1x8K"]) == 1
    assert cells(capsys.readouterr().out) == {
        ("1x8K", "base"): ["-", "-", "failed"],
        ("1x8K", "other"): ["1.800", "1.900", "1.850", "86.5%"],
    }


def test_a_tree_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = subprocess.run
    limits: dict[str, float] = {}

    def impatient(
        command: Sequence[str], *, cwd: Path, timeout: float, **others: Any
    ) -> subprocess.CompletedProcess[bytes]:
        limits[cwd.name] = timeout
        # The hanging one needs to be waited for no longer, and no other one is to be hurried.
        return run(command, cwd=cwd, timeout=0.3 if cwd.name == "hangs" else None, **others)

    monkeypatch.setattr(subprocess, "run", impatient)
    trees = [tree(tmp_path, "hangs", "import time\nwhile True: time.sleep(1)"), tree(tmp_path, "other", BASE)]
    assert main([*trees, "--rounds", "2", "--points", "1x8K", "--timeout", "77"]) == 1
    printed, told = capsys.readouterr()
    assert limits == {"hangs": 77, "other": 77}
    assert told.count("hangs: left out from here on: its bench was not over after 77 seconds") == 1
    assert cells(printed)["1x8K", "other"] == ["2.000", "2.000", "2.000", "80.0%"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["base={base}"], "name two trees or more"),
        (["base={base}", "{base}"], "is not NAME=FOLDER"),
        (["base={base}", "=x"], "'=x' is not NAME=FOLDER"),
        (["base={base}", "base={base}"], "two trees are called base"),
        (["base={base}", "empty={empty}"], "empty: there is no package headrace in"),
        (["base={base}", "same={base}", "--points", "1x8K", "17x8K"], "'17x8K': a step has 1 to 16 rows"),
        (["base={base}", "same={base}", "--points", "fast"], "'fast' is not ROWSxCONTEXT"),
        (["base={base}", "same={base}", "--rounds", "0"], "--rounds and --timeout must be above 0"),
        (["base={base}", "same={base}", "--timeout", "nan"], "--rounds and --timeout must be above 0"),
        (["base={base}", "same={base}", "--options", "'"], "argument --options: invalid"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], sentence: str
) -> None:
    tree(tmp_path, "base", BASE)
    folders: Mapping[str, Path] = {"base": tmp_path / "base", "empty": tmp_path}
    with pytest.raises(SystemExit) as ended:
        main([argument.format(**folders) for argument in arguments])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "log").exists()
