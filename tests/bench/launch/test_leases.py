"""Leases of GPUs and of the machine: real processes that hold and wait, on a machine that nvidia-smi says has GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from launches import CLEAN, command, wait_until

from gradwire.base.errors import BadInput
from gradwire.bench.launch import leases

UUIDS = [f"GPU-{letter * 4}" for letter in "abcd"]


class Machine:
    """A machine with four GPUs, as its nvidia-smi and its folder of locks show it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lines = "\n".join(f"{index}, {uuid}" for index, uuid in enumerate(UUIDS))
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<END\n{lines}\nEND\n")
        (folder / "nvidia-smi").chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        self.environment = {**CLEAN, "PATH": path, leases.FOLDER: str(folder / "locks")}
        self.environment.pop(leases.VISIBLE, None)
        self.running: list[subprocess.Popen[str]] = []

    def launch(self, name: str, world_size: int, *flags: str, deed: str = "wait", device: str = "cuda", **variables):
        """A run whose ranks say what they see and then wait, or end."""
        flags = ("--world_size", str(world_size), *flags)
        deeds = dict.fromkeys(range(world_size), deed)
        words = command(self.folder / name, deeds, *flags, probe=("--device", device))
        process = subprocess.Popen(words, env=self.environment | variables, stderr=subprocess.PIPE, text=True)
        self.running.append(process)
        return process

    def seen(self, name: str) -> list[str]:
        """The devices that the ranks of a run see, once all of its two ranks have started."""
        found = sorted((self.folder / name).glob("started*.json"))
        return [json.loads(path.read_text()).get(leases.VISIBLE) for path in found]

    def started(self, name: str) -> bool:
        return bool(self.seen(name))


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    yield machine
    for process in machine.running:
        process.kill()
        process.communicate()


def waiting(process: subprocess.Popen[str]) -> str:
    """The line by which a run says that it waits."""
    return process.stderr.readline()


def test_runs_get_their_own_gpus_and_as_many_as_ranks(machine):
    machine.launch("one", 1)
    machine.launch("two", 2)
    wait_until(lambda: len(machine.seen("one")) == 1 and len(machine.seen("two")) == 2)
    one, two = (set(machine.seen(name)[0].split(",")) for name in ("one", "two"))
    assert (len(one), len(two)) == (1, 2)
    assert not one & two
    assert one | two < set(UUIDS)


def test_more_than_the_machine_has_is_refused(machine):
    refused = machine.launch("five", 5)
    _, printed = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert printed == (
        "gradwire launch: 5 ranks need a GPU each and this machine has 4: use a smaller world size or --device cpu. "
        "With --backend gloo, ranks share GPUs.\n"
    )
    assert not machine.started("five")


def test_ranks_share_gpus_with_gloo_alone(machine, monkeypatch):
    for name in ("PATH", leases.FOLDER):
        monkeypatch.setenv(name, machine.environment[name])
    monkeypatch.delenv(leases.VISIBLE, raising=False)
    assert [leases.wanted_gpus("cuda", "gloo", ranks) for ranks in (3, 4, 5)] == [3, 4, 4]
    assert [leases.wanted_gpus(device, "nccl", 5) for device in ("cuda", "auto", "cpu", None)] == [5, 5, 0, 0]


def test_only_what_is_visible_is_leased_whatever_it_is_called(machine):
    refused = machine.launch("two", 2, **{leases.VISIBLE: "3"})
    _, printed = refused.communicate(timeout=60)
    assert (refused.returncode, "CUDA_VISIBLE_DEVICES is '3'" in printed) == (2, True)
    machine.launch("three", 3, **{leases.VISIBLE: "0,1,3"})
    wait_until(lambda: machine.started("three"))
    assert machine.seen("three")[0] == ",".join(UUIDS[index] for index in (0, 1, 3))
    by_name = machine.launch("by_name", 1, **{leases.VISIBLE: UUIDS[3]})
    assert waiting(by_name) == "gradwire launch: waiting for 1 of 1 GPUs, in use by other runs ...\n"


def test_a_killed_holder_frees_its_lease_and_the_first_that_waits_gets_it(machine):
    holder = machine.launch("holder", 4)
    wait_until(lambda: machine.started("holder"))
    large = machine.launch("large", 3)
    assert waiting(large) == "gradwire launch: waiting for 3 of 4 GPUs, in use by other runs ...\n"
    small = machine.launch("small", 2)
    assert waiting(small) == "gradwire launch: waiting for runs that wait for GPUs ...\n"
    assert not machine.started("large") and not machine.started("small")
    holder.send_signal(signal.SIGKILL)
    wait_until(lambda: machine.started("large"))
    assert len(machine.seen("large")[0].split(",")) == 3
    assert waiting(small) == "gradwire launch: waiting for 1 of 4 GPUs, in use by other runs ...\n"
    large.send_signal(signal.SIGKILL)
    wait_until(lambda: machine.started("small"))


@pytest.mark.parametrize(("device", "expected"), [("cpu", None), ("auto", UUIDS[0])])
def test_a_run_on_the_cpu_leases_nothing(machine, device, expected):
    done = machine.launch("own", 1, deed="end", device=device)
    assert done.wait(60) == 0
    assert machine.seen("own") == [expected]


def test_a_run_that_is_timed_runs_alone(machine):
    machine.launch("first", 1, device="cpu")
    machine.launch("second", 1, device="cpu")
    wait_until(lambda: machine.started("first") and machine.started("second"))
    timed = machine.launch("timed", 1, "--alone", device="cpu")
    assert waiting(timed) == "gradwire launch: waiting for the runs on this machine ...\n"
    late = machine.launch("late", 1, device="cpu")
    assert waiting(late) == "gradwire launch: waiting for a timed run ...\n"
    assert not machine.started("timed")
    for process in machine.running[:2]:
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: machine.started("timed"))
    assert not machine.started("late")
    timed.send_signal(signal.SIGKILL)
    wait_until(lambda: machine.started("late"))


def test_the_folder_of_locks_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.delenv(leases.FOLDER, raising=False)
    monkeypatch.setattr(leases, "Path", lambda _: tmp_path)
    made = leases.folder()
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o777)
    with pytest.raises(BadInput, match="not this user's own folder"):
        leases.folder()
