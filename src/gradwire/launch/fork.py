"""Ranks forked from one process that has already imported what each of them needs.

Importing torch and transformers takes a rank longer than many a run. The template imports them once, beside the
launcher's own checks, and forks a rank for each command that it is sent. It holds no torch state: nothing is computed
before the fork, and no CUDA context exists, so ranks on GPUs are started by torchrun.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from gradwire.errors import RunFault
from gradwire.launch.keeper import KEEPER, RANK_GRACE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the ranks' business; the template outlives them


class Template:
    """The process that forks ranks. It imports at once, and waits for `start` or the end of the ``with`` block.

    Args:
        modules: What the ranks need and takes long to import.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._channel, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), *modules]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._started = False
        self.stopped = False
        theirs.close()

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()  # the template sees it, ends the ranks that are left, and exits
        if not self._started:
            self._process.kill()  # it may still be importing
        self._process.wait()

    def start(self, command: Sequence[str], ranks: Sequence[dict[str, str]]) -> None:
        """Fork a rank for each of ``ranks``, its environment variables beside this process's; all run ``command``.

        Args:
            command: The command line of a rank: Python, then ``-m MODULE`` or a script, then its arguments.
            ranks: Variables of each rank's own.
        """
        job = {"command": list(command), "environment": dict(os.environ), "ranks": list(ranks)}
        self._started = True
        self._channel.sendall(json.dumps(job).encode() + b"\n")

    def stop(self) -> None:
        """Ask the ranks to end; `wait` returns when they have."""
        self.stopped = True
        self._channel.shutdown(socket.SHUT_WR)

    def wait(self) -> list[int]:
        """The ranks' exit codes, once they have ended: all with 0, or the first with another one and then the others.

        Raises:
            RunFault: If the template itself ended.
        """
        with self._channel.makefile() as answer:
            line = answer.readline()
        if not line:
            raise RunFault("the process that forks the ranks ended early (out of memory?); its own output says more.")
        codes: list[int] = json.loads(line)
        return codes


def serve(channel: socket.socket, modules: Sequence[str]) -> None:
    """Be the template: import, wait for one job, run it, and answer with the ranks' exit codes.

    Args:
        channel: To the launcher. Its end is a request to stop: the launcher has shut it, or is gone.
        modules: What to import.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for module in modules:
        importlib.import_module(module)
    with channel.makefile() as jobs:
        line = jobs.readline()
    if not line:
        return
    job = json.loads(line)
    os.environ.clear()
    os.environ.update(job["environment"], **{KEEPER: str(os.getpid())})
    context = get_context("fork")
    ranks = [context.Process(target=_run, args=(channel, job["command"][1:], own)) for own in job["ranks"]]
    try:
        for rank in ranks:
            rank.start()
        _wait(ranks, channel)
    finally:
        _end(ranks)
    with suppress(BrokenPipeError):  # the launcher is gone
        channel.sendall(json.dumps([rank.exitcode for rank in ranks]).encode() + b"\n")


def _run(channel: socket.socket, words: Sequence[str], variables: dict[str, str]) -> None:
    """Be a rank: run what ``python WORDS`` would."""
    channel.close()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(variables)
    Path("/proc/self/comm").write_text(f"rank{variables['RANK']}")  # what top shows
    if words[0] == "-m":
        sys.argv = [words[1], *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def _wait(ranks: Sequence[BaseProcess], channel: socket.socket) -> None:
    """Return when all ranks have ended, one has failed, or the launcher asks to stop."""
    while running := [rank for rank in ranks if rank.exitcode is None]:
        ready = connection.wait([channel, *(rank.sentinel for rank in running)])
        if channel in ready or any(rank.exitcode for rank in ranks):
            return


def _end(ranks: Sequence[BaseProcess]) -> None:
    """Ask the ranks that still run to end; kill those that have not after ``RANK_GRACE`` seconds."""
    started = [rank for rank in ranks if rank.pid is not None]
    for rank in started:
        rank.terminate()
    deadline = time.monotonic() + RANK_GRACE
    for rank in started:
        rank.join(max(0.0, deadline - time.monotonic()))
        if rank.exitcode is None:
            rank.kill()
            rank.join()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
