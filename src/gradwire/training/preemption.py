"""Being told to stop: a signal is noted, and acted on when all ranks are between two optimizer steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # a scheduler's, and Ctrl-C


class Preemption:
    """Whether this process was told to stop, and whether all ranks know that one of them was."""

    def __init__(self) -> None:
        self.requested = False
        self.agreed = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; a second Ctrl-C does not wait."""
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def preemption() -> Iterator[Preemption]:
    """Note signals instead of ending by them; from the main thread only.

    Where one came they are noted to the end of the process, which is about to end by itself.
    """
    asked = Preemption()
    before = {number: signal.signal(number, asked.note) for number in SIGNALS}
    try:
        yield asked
    finally:
        if not asked.requested:
            for number, handler in before.items():
                signal.signal(number, handler)
