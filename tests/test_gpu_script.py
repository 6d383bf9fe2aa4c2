"""The script that checks everything on a GPU, tried without one: nothing stops it, and nothing is done twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("bytes", "codecs", "reduction", "model", "gradients", "strategies", "quality")
WORK = """
import os, sys, time
import torch
from gpu.part import Part
from gpu.workers import Failed, Ranks, alone, each

def good(_, number): return {"number": number}
def bad(_, number): raise ValueError(f"number {number}")
def dies(_): os._exit(7)
def hangs(_): time.sleep(60)
def rank_of(rank): return rank

part = Part("trial")
jobs = {"one": (good, 1), "dies": (dies,), "bad": (bad, 3), "hangs": (hangs,), "two": (good, 2)}
jobs = {name: job for name, job in jobs.items() if part.row(name) is None}
for name, found in each(jobs, 2, 4, lambda: part.left):
    part.record(name, {"error": str(found)} if isinstance(found, Failed) else found)
ranks = Ranks(lambda: [alone, alone])
part.measure("ranks", lambda: {"number": ranks.run(5, good, 4)[1]["number"]})
part.measure("a rank dies", lambda: ranks.run(5, dies)[0])
part.measure("ranks again", lambda: ranks.run(5, good, 5)[0])
ranks.end()
part.measure("maybe", lambda: 1 / 0, optional=True)
part.target("speed", 2.0, 1.0)
part.seconds = 0
part.measure("too late", lambda: {})
sys.exit(part.finish(["number"]))
"""


def script(*parts: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {"DEVICE": "cpu", "SIZE": "small", "PYTHON": sys.executable} | variables
    command = [str(ROOT / "benchmarks" / "gpu.sh"), *parts]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | given)


def results(folder: Path, part: str) -> dict:
    return json.loads((folder / f"{part}.json").read_text())


def trial(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DEVICE": "cpu", "OUT": str(folder), "PYTHONPATH": f"{ROOT}/src:{ROOT}/benchmarks"}
    (folder / "work.py").write_text(WORK)
    command = [sys.executable, str(folder / "work.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.full
def test_what_fails_hangs_or_dies_is_recorded_and_the_rest_runs(tmp_path):
    done = trial(tmp_path)
    assert done.returncode == 1, done.stderr
    found = results(tmp_path, "trial")
    rows = {row["name"]: row for row in found["rows"]}
    assert [rows[name]["number"] for name in ("one", "two", "ranks", "ranks again")] == [1, 2, 4, 5]
    assert "exit code 7" in rows["dies"]["error"] and "exit code 7" in rows["a rank dies"]["error"]
    assert "ValueError: number 3" in rows["bad"]["error"]
    assert "no answer" in rows["hangs"]["error"]
    assert "ZeroDivisionError" in rows["maybe"]["note"]
    assert sorted(found["failed"]) == ["a rank dies", "bad", "dies", "hangs"]
    assert found["skipped"] == ["too late"] and not found["finished"]
    assert [target["met"] for target in found["targets"]] == [False]


@pytest.mark.full
def test_what_succeeded_is_not_repeated(tmp_path):
    names = ("one", "dies", "hangs", "two", "ranks", "a rank dies", "ranks again", "maybe", "too late")
    before = [{"name": name, "number": 17} for name in names]
    before.append({"name": "bad", "error": "was wrong once"})
    (tmp_path / "trial.json").write_text(json.dumps({"rows": before}))
    assert trial(tmp_path).returncode == 1
    after = results(tmp_path, "trial")
    assert after["rows"][:-1] == before[:-1]
    assert after["rows"][-1]["name"] == "bad" and "number 3" in after["rows"][-1]["error"]
    assert not after["skipped"]


@pytest.mark.full
def test_an_unknown_part_is_refused_and_a_finished_one_skipped(tmp_path):
    refused = script("codec", OUT=str(tmp_path))
    assert refused.returncode == 2 and "no part codec" in refused.stderr
    row = {"part": "model", "finished": True, "failed": [], "skipped": [], "targets": [], "rows": [], "took_s": 1.0}
    (tmp_path / "model.json").write_text(json.dumps(row, indent=1))
    done = script("model", OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "model: finished before" in done.stdout and "| model | ok" in done.stdout


@pytest.fixture
def merged(tmp_path):
    """A function that merges a summary into a page, and returns the exit code and the page."""
    page = tmp_path / "page.md"
    page.write_text("# On a GPU\n\n## Before\n\ntext\n\n## After\n\nmore\n")

    def merge(summary: str) -> tuple[int, str]:
        (tmp_path / "summary.md").write_text(summary)
        environment = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": f"{ROOT}/src:{ROOT}/benchmarks"}
        command = [sys.executable, "-m", "gpu.part", "merge", str(page)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.returncode, page.read_text()

    return merge


def test_a_page_has_the_last_tables_of_each_card(merged):
    code, first = merged("# NVIDIA A\n\ntorch 1\n\n## bytes\n\n| 1 |\n")
    assert code == 0
    assert first.endswith("## After\n\nmore\n\n## Tables of NVIDIA A\n\ntorch 1\n\n### bytes\n\n| 1 |\n")
    _, both = merged("# NVIDIA B\n\ntorch 1\n\n## bytes\n\n| 2 |\n")
    _, again = merged("# NVIDIA A\n\ntorch 2\n\n## codecs\n\n| 3 |\n")
    assert again == both.replace("torch 1\n\n### bytes\n\n| 1 |", "torch 2\n\n### codecs\n\n| 3 |")
    assert merged("# CPU\n\ntorch 2\n\n## bytes\n") == (2, again)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_part_runs_without_a_gpu(tmp_path):
    done = script(OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for part in PARTS:
        found = results(tmp_path, part)
        assert found["finished"] and not found["failed"] and found["rows"], part
    summary = (tmp_path / "summary.md").read_text()
    assert all(f"## {part}" in summary for part in PARTS)
