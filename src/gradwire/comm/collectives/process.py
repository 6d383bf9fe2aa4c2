"""This process as the system sees it: its sockets, and its threads. Linux only: elsewhere there are none."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from threading import get_native_id


def open_sockets() -> set[int]:
    """Return the file descriptors of this process's sockets; nothing on a system that does not list them."""
    sockets = set[int]()
    with suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            if entry.is_socket():
                sockets.add(int(entry.name))
    return sockets


def shut_down(descriptor: int) -> None:
    """Close both directions of a connection; its descriptor stays open. A socket that only listens is left alone."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.getpeername()  # raises for one that listens: gloo aborts the process if that fails
        connection.shutdown(socket.SHUT_RDWR)


# Why: docs/decisions.md, "At exit gloo's threads come to rest first".
def wait_for_threads(seconds: float) -> None:
    """Wait until no other thread of this process runs or could run, but at most so long.

    One of gloo's that is late frees the tensors of a collective that has ended. It needs Python's lock for that, and
    aborts the process if the interpreter is ending.
    """
    rests, end = 0, time.monotonic() + seconds
    while rests < 2 and time.monotonic() < end:  # one that waits for Python's lock rests too, and gets it in between
        time.sleep(0.001)
        rests = 0 if any_thread_runs() else rests + 1


def any_thread_runs() -> bool:
    """Whether another thread of this process runs or could run; False on a system that does not say so."""
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended
            state = (thread / "stat").read_text().rpartition(") ")[2][0]
            if state == "R" and int(thread.name) != get_native_id():
                return True
    return False
