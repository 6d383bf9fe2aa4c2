"""TensorBoard for a run, as a process that ends with its launcher."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def board(folder: Path) -> Iterator[None]:
    """Start TensorBoard on a free port, print its address once it answers there, and end it on exit.

    Args:
        folder: The folder whose event files and traces it shows.
    """
    command, pipe = [sys.executable, "-m", __name__, str(folder)], subprocess.PIPE
    ended = threading.Event()
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0) as process:
        reader = threading.Thread(target=_print_address, args=(process, ended), name="gradwire-tensorboard")
        reader.start()
        try:
            yield
        finally:
            ended.set()
            os.killpg(process.pid, signal.SIGKILL)  # plugins have processes that would keep the output open
            reader.join()


def _print_address(process: subprocess.Popen[str], ended: threading.Event) -> None:
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not ended.is_set():
        text = f"TensorBoard is at {address}" if address else "TensorBoard did not start; the run goes on"
        print(f"gradwire launch: {text}", file=sys.stderr, flush=True)


def main(folder: str) -> None:
    """Serve until the launcher is gone; end this process's group, which is not the terminal's, then."""
    from tensorboard.program import TensorBoard

    logging.disable(logging.WARNING)  # of plugins, for each file that they find
    server = TensorBoard()
    server.configure(logdir=folder, port=0, load_fast="false")  # the fast way prints a note
    print(server.launch(), flush=True)
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
