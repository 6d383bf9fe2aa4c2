"""Break a run from outside: ``inject.py PID RANK SIGNAL GLOB`` sends a rank a signal as soon as a file appears.

PID is the process that was started, RANK the rank below it (- for PID itself), and GLOB what the phase is known by. The
victim is stopped first: if the file is gone by then, the phase is over, so it goes on and the next file is waited for.
Prints the file that was seen. Knows nothing of the code under test but the names of its files and torchrun's variables.
"""

from __future__ import annotations

import glob
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """All processes below this one."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return own + [below for child in own for below in children(child)]


def alive(pid: int) -> bool:
    """Whether a process runs, that is, is not a zombie either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def victim(pid: int, rank: str) -> int | None:
    """The process to hit, once it is there."""
    if rank == "-":
        return pid
    for child in children(pid):
        try:
            started = f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if started or Path(f"/proc/{child}/comm").read_text().strip() == f"rank{rank}":  # a forked one
                return child
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


def main(pid: int, rank: str, name: str, pattern: str) -> None:
    """Wait for the phase and strike."""
    with suppress(PermissionError):
        os.nice(-15)  # a phase may last for milliseconds, and the machine may be busy
    target, deadline = None, time.monotonic() + 600
    while time.monotonic() < deadline and alive(target or pid):
        target = target or victim(pid, rank)
        if target is not None and (found := glob.glob(pattern)):  # noqa: PTH207
            with suppress(ProcessLookupError):
                os.kill(target, signal.SIGSTOP)
                if Path(found[0]).exists():
                    os.kill(target, getattr(signal, f"SIG{name}"))
                    print(found[0])
                    return
                os.kill(target, signal.SIGCONT)
        time.sleep(0.0005)
    sys.exit(f"process {pid} ended before {pattern} was seen")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
