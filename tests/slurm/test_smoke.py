"""The smoke experiment on a real Slurm: a cell on two nodes, one that Slurm puts back, one whose rank is killed once.

`make test-slurm` runs it, after the same experiment without Slurm, whose losses it must have.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import cluster
import pytest
import same_losses

from gradwire.base.files import read_json

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SMOKE = Path("results", "smoke")
TWO_NODES, KILLED = "ddp/int8/ws2/none/seed0", "fsdp2/int8/ws2/none/seed0"


class Job(NamedTuple):
    """Slurm's words about a job when it is over."""

    id: int
    rule: str
    state: str
    nodes: str
    gpus: str
    restarts: int


def test_smoke(slurm, tmp_path, capsys):
    assert (ROOT / SMOKE / "results.jsonl").exists(), "run it without Slurm first: make run CONFIG=configs/smoke.yaml"
    try:
        ran = run(tmp_path)
    except BaseException:
        with capsys.disabled():
            show_logs(slurm, tmp_path)
        raise
    with capsys.disabled():
        print(f"\n{'job':>4} {'state':<10} {'nodes':<7} {'GPUs':<14} {'put back':>8}  rule")
        for job in ran:
            print(f"{job.id:>4} {job.state:<10} {job.nodes:<7} {job.gpus:<14} {job.restarts:>8}  {job.rule}")
    assert [(job.state, job.nodes, job.restarts) for job in trained(ran, TWO_NODES)] == [("COMPLETED", "n[1-2]", 1)]
    assert [job.state for job in trained(ran, KILLED)] == ["FAILED", "COMPLETED"]
    assert all(job.gpus for job in ran if "rule_train_" in job.rule)
    environments = map(read_json, (tmp_path / SMOKE / "runs" / TWO_NODES / "environment").glob("rank*.json"))
    assert sorted(one["node"] for one in environments) == ["n1", "n2"]
    assert same_losses.compare(ROOT / SMOKE, tmp_path / SMOKE) == 3


def test_one_cell(slurm, tmp_path):
    """A rank on each of two nodes; the part of `test_smoke` that CI runs."""
    record = SMOKE / "runs" / TWO_NODES / "record.json"
    with snakemake(tmp_path, 1, "--set-resources", "train:gres='gpu:1'", "--", str(record)) as running:
        pass
    assert running.returncode == 0, (tmp_path / "snakemake-1.log").read_text()
    assert [(job.state, job.nodes) for job in trained(jobs(), TWO_NODES)][-1:] == [("COMPLETED", "n[1-2]")]
    found, expected = read_json(tmp_path / record), read_json(ROOT / record)
    assert [found[name] for name in same_losses.RECORD] == [expected[name] for name in same_losses.RECORD]


def run(folder: Path) -> list[Job]:
    """The whole experiment, with what is done to it from outside: all jobs that it took."""
    record = SMOKE / "runs" / TWO_NODES / "record.json"
    with snakemake(folder, 1, "--set-resources", "train:gres='gpu:1'", "--", str(record)) as running:
        wait_for(lambda: rank(folder, TWO_NODES, 0), running)
        put_back(max(job.id for job in jobs()))
    assert running.returncode == 0
    with snakemake(folder, 2, "--set-resources", "train:gpu=2") as running:
        os.kill(wait_for(lambda: rank(folder, KILLED, 1), running), signal.SIGKILL)
    assert running.returncode == 0
    return jobs()


@contextmanager
def snakemake(folder: Path, ranks_per_node: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the experiment by the Slurm profile, with this cluster's partition and sizes, to its end."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", folder]
    command += ["--workflow-profile", ROOT / "profiles" / "slurm", "--configfile", ROOT / "configs" / "smoke.yaml"]
    command += ["--config", f"ranks_per_node={ranks_per_node}", "--jobs", "4", "--latency-wait", "5"]
    command += ["--default-resources", f"slurm_partition={cluster.PARTITION}", "mem_mb=500", "runtime=5"]
    # There is no accounting here, so no sacct.
    command += ["--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "8"]
    command += ["--slurm-logdir", folder / "slurm_logs"]
    with (folder / f"snakemake-{ranks_per_node}.log").open("w") as log:
        running = subprocess.Popen([*map(str, command), *arguments], stdout=log, stderr=subprocess.STDOUT, text=True)
    try:
        yield running
        running.wait()
    finally:
        running.kill()  # else it would wait for its jobs


def put_back(number: int) -> None:
    """Have Slurm stop a job and queue it again, as when a node fails; to start at once instead of after two minutes."""
    subprocess.run(["scontrol", "requeue", str(number)], check=True)
    cluster.wait_for(lambda: state(number) == "PENDING", "the job to be put back")
    subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], check=True)


def state(number: int) -> str:
    """The state of one job."""
    return next(job.state for job in jobs() if job.id == number)


def jobs() -> list[Job]:
    """All jobs that Slurm still knows, in the order of their ids."""
    shown = subprocess.run(["scontrol", "show", "job", "-o"], capture_output=True, text=True, check=True).stdout
    return sorted(parsed(line) for line in shown.splitlines() if line.startswith("JobId="))


def parsed(line: str) -> Job:
    """One line of `scontrol show job -o`."""

    def field(key: str) -> str:
        found = re.search(rf"(?:^| ){key}=(\S*)", line)
        return found[1] if found else ""

    gpus = field("TresPerJob") or field("TresPerNode")
    return Job(
        int(field("JobId")), field("Comment"), field("JobState"), field("NodeList"), gpus, int(field("Restarts"))
    )


def trained(ran: list[Job], run: str) -> list[Job]:
    """The jobs that trained this run; the wildcard of its islands is empty."""
    wildcards = re.sub("ws|seed", "", run).replace("/", "_")
    return [job for job in ran if re.sub("_+", "_", job.rule) == f"rule_train_wildcards_{wildcards}"]


def rank(folder: Path, run: str, number: int) -> int | None:
    """The process of this rank of a run in this working directory: others on this machine may have the same run.

    torchrun's ranks have their command line and variables; forked ones a name, and a launcher two processes above.
    """
    for process in Path("/proc").glob("[0-9]*"):
        try:
            here = (process / "cwd").readlink() == folder
            forked = (process / "comm").read_text().strip() == f"rank{number}"
            variables = (process / "environ").read_bytes().split(b"\0")
            launched = words(parent(parent(process)) if forked else process)
        except OSError:
            continue
        if here and (forked or f"RANK={number}".encode() in variables) and str(SMOKE / "runs" / run) in launched:
            return int(process.name)
    return None


def parent(process: Path) -> Path:
    """The process that started this one."""
    return process.with_name((process / "stat").read_text().rpartition(")")[2].split()[1])


def words(process: Path) -> list[str]:
    """Its command line."""
    return (process / "cmdline").read_text().split("\0")


def wait_for(look: Callable[[], int | None], running: subprocess.Popen[str]) -> int:
    """The result of `look` in the end; an error if Snakemake ends before."""
    while (found := look()) is None:
        assert running.poll() is None, f"Snakemake ended with {running.returncode} too early"
        time.sleep(0.1)
    return found


def show_logs(*folders: Path) -> None:
    """The logs of Slurm, Snakemake and the rules."""
    for folder in folders:
        for log in sorted(folder.rglob("*.log")):
            print(f"--- {log}\n{log.read_text()[-3000:]}")
