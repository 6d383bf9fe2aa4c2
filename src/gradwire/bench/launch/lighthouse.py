"""torchft's lighthouse, which knows what groups there are, as a process that ends with its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.base.errors import RunFault

LOST_AFTER = 5.0  # seconds without a heartbeat
LOG = {"RUST_LOG": "error"}  # torchft's notes are for its developers


@contextmanager
def lighthouse(least: int, patience: float, lost_after: float = LOST_AFTER) -> Iterator[tuple[str, int]]:
    """Start a lighthouse at a free port; yield its address, and a file that is readable when it has ended.

    Args:
        least: Smallest number of groups in a quorum.
        patience: Seconds that the groups of a quorum wait for others that are alive.
        lost_after: Seconds without a heartbeat after which a group is lost.

    Raises:
        RunFault: If it does not start.
    """
    milliseconds = [round(1000 * seconds) for seconds in (patience, lost_after)]
    command = [sys.executable, "-m", __name__, *map(str, [least, *milliseconds])]
    pipe, environment = subprocess.PIPE, {**os.environ, **LOG}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise RunFault("torchft's lighthouse did not start; see its output.")
            yield address, process.stdout.fileno()
        finally:
            process.kill()


def main(least: int, patience_ms: int, lost_after_ms: int) -> None:
    """Serve until the launcher is gone, which decides what a signal means."""
    from torchft.coordination import LighthouseServer

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = LighthouseServer("127.0.0.1:0", least, patience_ms, None, lost_after_ms)
    print(f"http://127.0.0.1:{server.address().rpartition(':')[2].strip('/')}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
