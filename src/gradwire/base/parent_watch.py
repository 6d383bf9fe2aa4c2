"""Exits when the parent process dies, so that no orphans are left.

The parent is Snakemake for its jobs, and the launcher for its ranks. A killed parent cannot stop its children, so they
watch it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time

PARENT = "GRADWIRE_PARENT"  # process id of the parent to watch
GRACE = 45.0  # seconds to save and exit
RANK_GRACE = 30.0  # seconds for a rank that its launcher ends; the same as torchrun's


def watch() -> None:
    """Watch the parent process named in the environment, from a thread; do nothing if it is unset or not visible.

    When the parent exits, this process gets a SIGTERM, as from a scheduler, and a SIGKILL ``GRACE`` seconds later.
    """
    parent = os.environ.get(PARENT)
    if parent is None or not parent.isdecimal() or not hasattr(os, "pidfd_open"):
        return
    try:
        handle = os.pidfd_open(int(parent))
    except (OSError, OverflowError):  # already gone, or not visible from this namespace
        if os.getppid() == 1:
            _end(parent)
        return
    threading.Thread(target=_wait, args=(handle, parent), daemon=True).start()


def _wait(handle: int, parent: str) -> None:
    select.select([handle], [], [])
    _end(parent)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def _end(parent: str) -> None:
    print(f"gradwire: parent process {parent} has exited: stopping.", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
