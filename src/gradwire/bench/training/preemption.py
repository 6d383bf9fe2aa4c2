"""Graceful preemption: a signal is recorded, and training stops after the current optimizer step on all ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # from a scheduler, and Ctrl-C


class Preemption:
    """Stop request: ``requested`` on this rank, ``agreed`` once all ranks know of a request."""

    def __init__(self) -> None:
        self.requested = False
        self.agreed = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; a second Ctrl-C raises KeyboardInterrupt at once."""
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def preemption() -> Iterator[Preemption]:
    """Record termination signals instead of exiting on them; main thread only.

    After a signal the handlers stay installed, because the process is about to exit.
    """
    asked = Preemption()
    before = {number: signal.signal(number, asked.note) for number in SIGNALS}
    try:
        yield asked
    finally:
        if not asked.requested:
            for number, handler in before.items():
                signal.signal(number, handler)
