"""The network link that ``gradwire launch --link`` gave this rank or its island: its name and the bytes transmitted."""

from __future__ import annotations

import os
from pathlib import Path

from gradwire.base.errors import RunFault
from gradwire.base.units import UNSHAPED
from gradwire.bench.launch.links import INTERFACE, LINK

COUNTERS = Path("/proc/self/net/dev")  # of this process's network namespace
TRANSMITTED = 8  # index of the bytes sent among the columns after the interface's name


def link() -> str:
    """The name of the link, ``100mbit`` or ``between-100mbit``, or ``none``."""
    return os.environ.get(LINK, UNSHAPED)


def transmitted() -> int | None:
    """Bytes sent so far by the interface of this rank or its island, headers included; None without a link.

    Raises:
        RunFault: If the interface does not exist.
    """
    interface = os.environ.get(INTERFACE)
    if interface is None:
        return None
    for line in COUNTERS.read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[TRANSMITTED])
    raise RunFault(f"{INTERFACE} is {interface}, but {COUNTERS} has no such interface.")


def transmitted_since(before: int | None) -> int | None:
    """Bytes sent since `transmitted` returned ``before``; None without a link."""
    now = transmitted()
    return None if now is None or before is None else now - before
