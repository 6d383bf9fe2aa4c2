"""`gradwire launch --nodes 2` in a job of a real Slurm: the first failure is reported as on one machine.

Of `launch/nodes.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launches import CLEAN, PROBE, failure, left_behind, started, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def launch(output: Path, ranks: dict[int, str], nodes: int = 2) -> subprocess.Popen[str]:
    allocation = ["salloc", "--quiet", "--nodes=2", "--ntasks=2"]
    command = [sys.executable, str(PROBE), "launch", "--world_size", str(nodes), "--nodes", str(nodes), "--", "probe"]
    command += ["--output_dir", str(output), "--ranks", json.dumps(ranks)]
    return subprocess.Popen([*allocation, *command], env=CLEAN, stderr=subprocess.PIPE, text=True)


def ended(running: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and what it said."""
    said = running.communicate(timeout=200)[1]
    return running.returncode, said


def test_bad_input_keeps_its_code_and_is_reported_once(tmp_path):
    assert ended(launch(tmp_path, {1: "refuse"})) == (2, "gradwire launch: rank 1: an option is bad.\n")
    assert (failure(tmp_path)["rank"], failure(tmp_path)["exit_code"]) == (1, 2)
    assert {place["LOCAL_RANK"] for place in started(tmp_path).values()} == {"0"}


def test_a_killed_rank_is_named_and_not_the_one_that_lost_it(tmp_path):
    code, said = ended(launch(tmp_path, {0: "reduce", 1: "reduce"}))
    assert (code, said) == (
        3,
        "gradwire launch: rank 1: was killed by SIGKILL (out of memory?) and left no message.\n",
    )
    assert not list(tmp_path.glob(".launch-*")) and not left_behind(tmp_path)


def test_a_signal_lets_the_ranks_of_all_nodes_save(tmp_path):
    running = launch(tmp_path, {0: "save", 1: "save"})
    wait_until(lambda: len(started(tmp_path)) == 2, 100)
    os.kill(launcher(tmp_path), signal.SIGTERM)
    code, said = ended(running)
    assert (code, "stopped after a checkpoint; run it again to resume." in said) == (75, True), said
    assert not left_behind(tmp_path)


def launcher(output: Path) -> int:
    """The process of `gradwire launch`."""
    for process in Path("/proc").glob("[0-9]*"):
        words = (process / "cmdline").read_bytes().split(b"\0") if process.exists() else []
        if str(output).encode() in words and words[1:3] == [str(PROBE).encode(), b"launch"]:
            return int(process.name)
    raise AssertionError("no launcher")


def test_what_slurm_refuses_is_reported_in_its_own_words(tmp_path):
    code, said = ended(launch(tmp_path, {}, nodes=4))
    assert code == 3 and "Only allocated 2 nodes asked for 4" in said and said.count("\n") == 1
