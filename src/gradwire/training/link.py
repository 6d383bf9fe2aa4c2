"""The link of this rank, as ``gradwire launch --link`` gave it one: its rate, and what its interface transmitted."""

from __future__ import annotations

import os
from pathlib import Path

from gradwire.errors import RunFault
from gradwire.launch.links import INTERFACE, LINK
from gradwire.units import UNSHAPED

COUNTERS = Path("/proc/self/net/dev")  # of the network namespace that this process lives in
TRANSMITTED = 8  # column of the bytes sent, counted from the first one after the interface's name


def link() -> str:
    """The rate of this rank's link, or ``none``."""
    return os.environ.get(LINK, UNSHAPED)


def transmitted() -> int | None:
    """Bytes that this rank's own interface has sent so far, headers included; None where ranks share an interface.

    Raises:
        RunFault: If that interface is not there.
    """
    interface = os.environ.get(INTERFACE)
    if interface is None:
        return None
    for line in COUNTERS.read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[TRANSMITTED])
    raise RunFault(f"{INTERFACE} names {interface}, and {COUNTERS} has no such interface.")


def transmitted_since(before: int | None) -> int | None:
    """Bytes that it has sent since it had sent ``before``."""
    now = transmitted()
    return None if now is None or before is None else now - before
