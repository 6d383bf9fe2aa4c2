"""Linux namespaces that a process joins by itself; Python has `os.setns` since 3.12 only."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

KINDS = ("user", "net", "mnt")  # a user namespace gives the right to join the others


def join(folder: Path) -> None:
    """Join the namespaces of a process where they are not this one's.

    Args:
        folder: Its ``/proc/<pid>/ns``.

    Raises:
        OSError: If the kernel refuses.
    """
    others = [kind for kind in KINDS if (folder / kind).readlink() != Path("/proc/self/ns", kind).readlink()]
    opened = [os.open(folder / kind, os.O_RDONLY) for kind in others]  # before the view of the files changes
    for file in opened:
        enter(file)


def enter(file: int) -> None:
    """Enter the namespace of an open file, and close it.

    Raises:
        OSError: If the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
    os.close(file)
