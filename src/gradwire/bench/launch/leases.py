"""Leases of this machine and its GPUs: file locks, which the kernel releases when their holder exits.

A run leases one GPU per rank and sees no others. A timed run has the machine to itself; other runs share it.
Waiting runs queue, so a large run does not starve behind small ones, and deadlocks cannot occur.

Locks are per user. To share them between users, all set GRADWIRE_LOCKS to the same folder.
"""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from gradwire.base.errors import BadInput
from gradwire.base.files import check_folder

VISIBLE = "CUDA_VISIBLE_DEVICES"
FOLDER = "GRADWIRE_LOCKS"
POLL = 0.2  # seconds between attempts to lock
LIST = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")


def devices() -> list[str]:
    """UUIDs of the GPUs that this process may use: all, or those in CUDA_VISIBLE_DEVICES.

    Entries that nvidia-smi does not list, such as a part of a GPU, are used as they are.
    """
    try:
        listed = subprocess.run(LIST, capture_output=True, text=True, check=False)
        lines = listed.stdout.splitlines() if listed.returncode == 0 else []
    except FileNotFoundError:
        lines = []
    machine = dict(line.split(", ", 1) for line in lines if ", " in line)
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return list(machine.values())
    return [machine.get(name, name) for name in filter(None, map(str.strip, visible.split(","))) if name != "-1"]


def wanted_gpus(device: str | None, backend: str | None, world_size: int) -> int:
    """Number of GPUs that a command leases: one per rank if its ``--device`` uses GPUs, else none.

    With ``--backend gloo``, ranks share GPUs where the machine has fewer.
    """
    if device == "cpu" or device is None or (device == "auto" and not devices()):
        return 0
    return min(world_size, max(1, len(devices()))) if backend == "gloo" else world_size


@contextmanager
def gpus(wanted: int) -> Iterator[dict[str, str]]:
    """Lease ``wanted`` of this machine's GPUs; wait while too few are free.

    Yields:
        Environment variables that restrict ranks to these GPUs; empty if none are wanted.

    Raises:
        BadInput: If the machine has fewer.
    """
    if not wanted:
        yield {}
        return
    offered = devices()
    if len(offered) < wanted:
        seen = f" ({VISIBLE} is {os.environ[VISIBLE]!r})" if VISIBLE in os.environ else ""
        raise BadInput(
            f"{wanted} ranks need a GPU each and this machine has {len(offered)}{seen}: use a smaller world size "
            "or --device cpu. With --backend gloo, ranks share GPUs."
        )
    with ExitStack() as held:
        with _locked("queue-gpu", "runs that wait for GPUs"):
            mine: list[str] = []
            announced = False
            while len(mine) < wanted:
                for device in offered:
                    if len(mine) < wanted and device not in mine and (lock := _try(f"gpu-{device}")) is not None:
                        held.enter_context(lock)
                        mine.append(device)
                if len(mine) < wanted:
                    if not announced:
                        _announce(f"waiting for {wanted - len(mine)} of {len(offered)} GPUs, in use by other runs")
                    announced = True
                    time.sleep(POLL)
        yield {VISIBLE: ",".join(device for device in offered if device in mine)}


@contextmanager
def machine(alone: bool) -> Iterator[None]:
    """Lease this machine, ``alone`` or shared with other runs; wait until it is available."""
    whose = "the runs on this machine" if alone else "a timed run"
    with ExitStack() as held:
        with _locked("queue-machine", whose):
            held.enter_context(_locked("machine", whose, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


def folder() -> Path:
    """The folder of the locks; by default one folder per user.

    Raises:
        BadInput: If it is not writable, or if another user owns the default folder or may write to it.
    """
    if FOLDER in os.environ:
        path = Path(os.environ[FOLDER])
        check_folder(path, FOLDER)
        return path
    path = Path("/tmp") / f"gradwire-{os.getuid()}"  # not TMPDIR, which Snakemake and Slurm set per job
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BadInput(f"{path} is not this user's own folder; remove it, or set {FOLDER} to a folder for locks.")
    return path


def _open(name: str) -> IO[str]:
    return (folder() / f"{name.replace('/', '_')}.lock").open("a")


def _try(name: str) -> IO[str] | None:
    """Return the open, locked file, or None if another process holds the lock."""
    stream = _open(name)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    return stream


@contextmanager
def _locked(name: str, whose: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock; print a message if it has to wait."""
    with _open(name) as stream:
        try:
            fcntl.flock(stream, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            _announce(f"waiting for {whose}")
            fcntl.flock(stream, kind)
        yield


def _announce(message: str) -> None:
    print(f"gradwire launch: {message} ...", file=sys.stderr, flush=True)
