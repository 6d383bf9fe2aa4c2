"""The smoke experiment on a real Slurm: one cell on two nodes, one that is killed once, one that Slurm puts back.

`make test-slurm` runs it, after the same experiment without Slurm, whose losses it must have.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import cluster
import pytest
import same_losses

from gradwire.files import read_json

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "results" / "smoke"
TWO_NODES, KILLED = "ddp/int8/ws2/none/seed0", "fsdp2/int8/ws2/none/seed0"


class Job(NamedTuple):
    """What Slurm says of a job when it is over."""

    id: int
    rule: str
    state: str
    nodes: str
    gpus: str
    restarts: int


def snakemake(folder: Path, ranks_per_node: int, *arguments: str) -> subprocess.Popen[str]:
    """Run the experiment by the Slurm profile, with this cluster's partition and sizes."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", folder]
    command += ["--workflow-profile", ROOT / "profiles" / "slurm", "--configfile", ROOT / "configs" / "smoke.yaml"]
    command += ["--config", f"ranks_per_node={ranks_per_node}", "--jobs", "4", "--latency-wait", "5"]
    command += ["--default-resources", f"slurm_partition={cluster.PARTITION}", "mem_mb=500", "runtime=5"]
    # without accounting there is no sacct
    command += ["--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "8"]
    command += ["--slurm-keep-successful-logs", "--slurm-logdir", folder / "slurm_logs"]
    log = (folder / f"snakemake-{ranks_per_node}.log").open("w")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen([*map(str, command), *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment)


def jobs() -> list[Job]:
    """All jobs that Slurm still knows, in the order of their ids."""
    shown = subprocess.run(["scontrol", "show", "job", "-o"], capture_output=True, text=True, check=True).stdout
    return [job(line) for line in shown.splitlines() if line.startswith("JobId=")]


def job(line: str) -> Job:
    """One line of `scontrol show job -o`."""

    def told(key: str) -> str:
        found = re.search(rf"(?:^| ){key}=(\S*)", line)
        return found[1] if found else ""

    gpus = told("TresPerJob") or told("TresPerNode")
    return Job(int(told("JobId")), told("Comment"), told("JobState"), told("NodeList"), gpus, int(told("Restarts")))


def rank(folder: str, number: int) -> int | None:
    """The process of this rank of the run with this folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={number}".encode() in variables and any(word.endswith(folder.encode()) for word in words):
            return int(process.name)
    return None


def wait_for(look, running: subprocess.Popen[str]):
    """What `look` finds in the end; an error if Snakemake ends before."""
    while (found := look()) is None:
        assert running.poll() is None, f"Snakemake ended with {running.returncode} too early"
        time.sleep(0.1)
    return found


def test_smoke(tmp_path, capsys):
    assert (PLAIN / "results.jsonl").exists(), "run it without Slurm first: make run CONFIG=configs/smoke.yaml"
    with cluster.cluster() as slurm:
        try:
            ran = run(tmp_path)
        except BaseException:
            with capsys.disabled():
                show_logs([slurm, tmp_path])
            raise
    with capsys.disabled():
        print(f"\n{'job':>4} {'state':<10} {'nodes':<8} {'GPUs':<12} {'requeued':>8}  rule")
        for one in ran:
            print(f"{one.id:>4} {one.state:<10} {one.nodes:<8} {one.gpus:<12} {one.restarts:>8}  {one.rule}")
    assert [(one.state, one.nodes, one.restarts) for one in trained(ran, TWO_NODES)] == [("COMPLETED", "n[1-2]", 1)]
    assert [one.state for one in trained(ran, KILLED)] == ["FAILED", "COMPLETED"]
    assert all(one.gpus for one in ran if one.rule.startswith("rule_train"))
    results = tmp_path / "results" / "smoke"
    environments = map(read_json, (results / "runs" / TWO_NODES / "environment").iterdir())
    assert sorted(one["node"] for one in environments) == ["n1", "n2"]
    assert same_losses.compare(PLAIN, results) == 3
    assert left_over(tmp_path) == []


def trained(ran: list[Job], run: str) -> list[Job]:
    """The jobs that trained this run."""
    return [one for one in ran if one.rule == f"rule_train_wildcards_{run.replace('/', '_')}"]


def run(folder: Path) -> list[Job]:
    """The whole experiment, with what is done to it from outside."""
    running = snakemake(
        folder, 1, "--set-resources", "train:gres='gpu:1'", "--", f"results/smoke/runs/{TWO_NODES}/record.json"
    )
    wait_for(lambda: rank(TWO_NODES, 0), running)
    subprocess.run(["scontrol", "requeue", str(max(one.id for one in jobs()))], check=True)
    assert running.wait() == 0
    running = snakemake(folder, 2, "--set-resources", "train:gpu=2")
    os.kill(wait_for(lambda: rank(KILLED, 1), running), signal.SIGKILL)
    assert running.wait() == 0
    return jobs()


def left_over(folder: Path) -> list[str]:
    """Processes that belong to Slurm or to this test, and links in /etc/slurm, when all is over."""
    found = [str(path) for path in cluster.ETC.iterdir() if path.is_symlink()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in command or re.match(r"\S*(munged|slurmctld|slurmd|slurmstepd)\b", command):
            found.append(command)
    return found


def show_logs(folders: list[Path]) -> None:
    """What Slurm, Snakemake and the rules wrote."""
    for folder in folders:
        for log in sorted(folder.rglob("*.log")):
            print(f"--- {log}\n{log.read_text()[-3000:]}")
