"""Who may use this machine's GPUs, and when: file locks that the kernel lets go of with their holder.

A cell leases exactly as many GPUs as it has ranks, and sees no others. A cell that is run for its times has the machine
for itself, while other cells share it. Whoever has to wait does so in a queue: a cell which needs much is not overtaken
for ever by those that need little, and no two wait for each other.

The locks are a user's: cells of several users see each other where all of them set GRADWIRE_LOCKS to one folder.
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

from gradwire.errors import BadInput
from gradwire.files import check_folder

VISIBLE = "CUDA_VISIBLE_DEVICES"
FOLDER = "GRADWIRE_LOCKS"
POLL = 0.2  # seconds between two looks at what is held by others
LIST = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")


def devices() -> list[str]:
    """The GPUs that this process may use, by UUID: the machine's, or what CUDA_VISIBLE_DEVICES leaves of them.

    What that variable holds and nvidia-smi does not list, such as part of a GPU, is taken by its name.
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


def wanted_gpus(device: str | None, world_size: int) -> int:
    """How many GPUs a command leases: one for each of its ranks where its ``--device``, if it has one, uses any."""
    return world_size if device == "cuda" or (device == "auto" and devices()) else 0


@contextmanager
def gpus(wanted: int) -> Iterator[dict[str, str]]:
    """Hold ``wanted`` of this machine's GPUs; waits while others hold too many.

    Yields:
        The environment variables that show ranks these GPUs and no others; none where none are wanted.

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
            f"{wanted} ranks need a GPU each and this machine offers {len(offered)}{seen}: take a smaller world size, "
            "or --device cpu."
        )
    with ExitStack() as held:
        with _locked("queue-gpu", "cells that wait for GPUs"):
            mine: list[str] = []
            told = False
            while len(mine) < wanted:
                for device in offered:
                    if len(mine) < wanted and device not in mine and (lock := _try(f"gpu-{device}")) is not None:
                        held.enter_context(lock)
                        mine.append(device)
                if len(mine) < wanted:
                    if not told:
                        _tell(f"waiting for {wanted - len(mine)} of {len(offered)} GPUs, which other cells hold")
                    told = True
                    time.sleep(POLL)
        yield {VISIBLE: ",".join(device for device in offered if device in mine)}


@contextmanager
def machine(alone: bool) -> Iterator[None]:
    """Use this machine together with others, or ``alone``; waits until that can be."""
    whose = "the cells that run here" if alone else "a cell whose times are taken"
    with ExitStack() as held:
        with _locked("queue-machine", whose):
            held.enter_context(_locked("machine", whose, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


def folder() -> Path:
    """Where the locks are; by default a folder of this user alone, the same for all of its processes.

    Raises:
        BadInput: If it cannot be written to; if another user made the default folder, or may write to it.
    """
    if FOLDER in os.environ:
        path = Path(os.environ[FOLDER])
        check_folder(path, FOLDER)
        return path
    path = Path("/tmp") / f"gradwire-{os.getuid()}"  # not TMPDIR, which Snakemake and Slurm set for each job
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise BadInput(f"{path} is not this user's own folder; remove it, or set {FOLDER} to a folder for locks.")
    return path


def _open(name: str) -> IO[str]:
    return (folder() / f"{name.replace('/', '_')}.lock").open("a")


def _try(name: str) -> IO[str] | None:
    """The open, locked file, or None where another process holds it."""
    stream = _open(name)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    return stream


@contextmanager
def _locked(name: str, whose: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock, and say so where that has to wait."""
    with _open(name) as stream:
        try:
            fcntl.flock(stream, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            _tell(f"waiting for {whose}")
            fcntl.flock(stream, kind)
        yield


def _tell(message: str) -> None:
    print(f"gradwire launch: {message} ...", file=sys.stderr, flush=True)
