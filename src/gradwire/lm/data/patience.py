"""Lines on standard error about a step that takes long, so that it does not look as if it hung."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST = 10.0  # seconds after which the first line is printed


@contextmanager
def progress(describe: Callable[[], str]) -> Iterator[None]:
    """Print how far a step is after ``FIRST`` seconds, and each time its duration has doubled.

    Args:
        describe: Returns what is being done, such as ``tokenizing, 1,000 documents``; called from another thread.
    """
    ended, start = threading.Event(), time.monotonic()

    def tell() -> None:
        due = FIRST
        while not ended.wait(start + due - time.monotonic()):
            print(f"gradwire tokenize: {describe()}; {due:g} s so far.", file=sys.stderr, flush=True)
            due *= 2

    thread = threading.Thread(target=tell, name="gradwire-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
