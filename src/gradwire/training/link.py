"""The network link that ``gradwire launch --link`` gave this rank: its rate and the bytes transmitted."""

from __future__ import annotations

import os
from pathlib import Path

from gradwire.errors import RunFault
from gradwire.launch.links import INTERFACE, LINK
from gradwire.units import UNSHAPED

COUNTERS = Path("/proc/self/net/dev")  # of this process's network namespace
TRANSMITTED = 8  # index of the bytes sent among the columns after the interface's name


def link() -> str:
    """The rate of this rank's link, or ``none``."""
    return os.environ.get(LINK, UNSHAPED)


def transmitted() -> int | None:
    """Bytes sent so far by this rank's own interface, headers included; None if ranks share an interface.

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
    """Bytes sent since `transmitted` returned ``before``; None if ranks share an interface."""
    now = transmitted()
    return None if now is None or before is None else now - before
