"""Forks ranks from one process that has already imported their modules.

Importing torch and transformers in each rank takes longer than many runs. The template imports them once, during the
launcher's own checks, and then forks all ranks. Nothing is computed before the fork, so there is no torch state to
inherit. CUDA does not survive a fork, so torchrun starts ranks on GPUs.
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

from gradwire.base.errors import RunFault
from gradwire.base.parent_watch import PARENT, RANK_GRACE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # ignored by the template, which outlives its ranks


# Why: docs/decisions.md, "Ranks on one machine's CPU are forked".
class Template:
    """The process that forks ranks. It imports modules, then waits for `start` or the end of the ``with`` block.

    Args:
        modules: The slow imports of the ranks.
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
        self._channel.close()  # the template ends the remaining ranks and exits
        if not self._started:
            self._process.kill()  # it may still be importing
        self._process.wait()

    def start(self, command: Sequence[str], ranks: Sequence[dict[str, str]]) -> None:
        """Fork one rank per item of ``ranks``; all run ``command``.

        Args:
            command: The command line of a rank: Python, then ``-m MODULE`` or a script, then its arguments.
            ranks: Environment variables of each rank, in addition to this process's.
        """
        job = {"command": list(command), "environment": dict(os.environ), "ranks": list(ranks)}
        self._started = True
        self._channel.sendall(json.dumps(job).encode() + b"\n")

    def stop(self) -> None:
        """Ask the ranks to exit; `wait` returns when they have."""
        self.stopped = True
        self._channel.shutdown(socket.SHUT_WR)

    def wait(self) -> list[int]:
        """Wait for the ranks and return their exit codes. If one fails, the others are ended.

        Raises:
            RunFault: If the template itself exited.
        """
        with self._channel.makefile() as answer:
            line = answer.readline()
        if not line:
            raise RunFault("the process that forks the ranks exited early (out of memory?); see its output.")
        codes: list[int] = json.loads(line)
        return codes


def serve(channel: socket.socket, modules: Sequence[str]) -> None:
    """Run the template: import, wait for one job, run it, and send the ranks' exit codes.

    Args:
        channel: Socket to the launcher. End of file means stop: the launcher shut it down or exited.
        modules: The modules to import.
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
    os.environ.update(job["environment"], **{PARENT: str(os.getpid())})
    context = get_context("fork")
    ranks = [context.Process(target=_run, args=(channel, job["command"][1:], variables)) for variables in job["ranks"]]
    try:
        for rank in ranks:
            rank.start()
        _wait(ranks, channel)
    finally:
        _end(ranks)
    with suppress(BrokenPipeError):  # the launcher has exited
        channel.sendall(json.dumps([rank.exitcode for rank in ranks]).encode() + b"\n")


def _run(channel: socket.socket, words: Sequence[str], variables: dict[str, str]) -> None:
    """Run ``python WORDS`` in a forked rank."""
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
    """Wait until all ranks have exited, one has failed, or the launcher asks to stop.

    Each round looks at one snapshot of the exit codes: a rank closes its sentinel before it has an exit code, so it may
    get one between two looks.
    """
    while None in (codes := [rank.exitcode for rank in ranks]) and not any(codes):
        running = [rank.sentinel for rank, code in zip(ranks, codes, strict=True) if code is None]
        if channel in connection.wait([channel, *running]):
            return


def _end(ranks: Sequence[BaseProcess]) -> None:
    """Terminate running ranks; kill those that have not exited after ``RANK_GRACE`` seconds."""
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
