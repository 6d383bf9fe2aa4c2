"""No orphans: a process ends when the one that it works for is gone, however that ended.

Snakemake's jobs work for Snakemake, a launcher's ranks for the launcher. A process that was killed cannot stop those
that it started, so they watch it themselves.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time

KEEPER = "GRADWIRE_KEEPER"  # the process id of whom this process works for
GRACE = 45.0  # seconds to save and end
RANK_GRACE = 30.0  # as many for a rank that its launcher ends; torchrun gives as many


def watch() -> None:
    """Watch the process that the environment names, from a thread; nothing where it names none that can be seen.

    When it is gone, this process gets a SIGTERM, as a scheduler would send it, and a SIGKILL after ``GRACE`` seconds.
    """
    keeper = os.environ.get(KEEPER)
    if keeper is None or not keeper.isdecimal() or not hasattr(os, "pidfd_open"):
        return
    try:
        handle = os.pidfd_open(int(keeper))
    except (OSError, OverflowError):  # gone already; or in another namespace, where it cannot be seen
        if os.getppid() == 1:
            _end(keeper)
        return
    threading.Thread(target=_wait, args=(handle, keeper), daemon=True).start()


def _wait(handle: int, keeper: str) -> None:
    select.select([handle], [], [])
    _end(keeper)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def _end(keeper: str) -> None:
    print(f"gradwire: process {keeper}, for which this one works, is gone: stopping.", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
