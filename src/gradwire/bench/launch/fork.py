"""Forks processes from one that has already imported their modules.

Importing torch and transformers takes longer than many runs. A template imports them once; the launcher's checks and
all ranks are forks of it. Nothing is computed in it, so there is no torch state to inherit. CUDA does not survive a
fork, so torchrun starts ranks on GPUs.

A launcher starts a template, which ends with it, or connects to the one that `share` started for all launchers of an
experiment. Each connection has a process that forks its jobs, with the launcher's folder, streams and namespaces.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gradwire.base.errors import RunFault
from gradwire.base.parent_watch import PARENT, RANK_GRACE
from gradwire.bench.launch import links

SHARED = "GRADWIRE_TEMPLATE"  # the socket of a template for all launchers
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # ignored by the template, which outlives its jobs
STREAMS = (0, 1, 2)
FORK = get_context("fork")


# Why: docs/decisions.md, "Ranks on one machine's CPU are forked".
class Template:
    """The process that forks this launcher's jobs, until the end of the ``with`` block.

    Args:
        modules: The slow imports of the jobs; a shared template has imported its own.
        variables: The template's environment variables, in addition to this process's; not for a shared one.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._started = False
        self.stopped = False
        if path := os.environ.get(SHARED):
            self._channel = socket.socket(socket.AF_UNIX)
            try:
                self._channel.connect(path)
            except OSError as error:
                raise RunFault(f"the process that forks all ranks has exited ({error}): see its output.") from None
        else:
            self._channel, theirs = socket.socketpair()
            self._process = _start(theirs, modules, variables)
            theirs.close()

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()  # the template ends the remaining processes and exits
        if self._process is None:
            return
        if not self._started:
            self._process.kill()  # it may still be importing
        self._process.wait()

    def start(self, command: Sequence[str], processes: Sequence[Mapping[str, str]]) -> None:
        """Fork one process per item of ``processes``; all run ``command``.

        Args:
            command: The command line: Python, then ``-m MODULE`` or a script, then its arguments.
            processes: Environment variables of each process, in addition to this process's.
        """
        job = {
            "command": list(command),
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
            "launcher": os.getpid(),
            "processes": list(processes),
        }
        self._started = True
        socket.send_fds(self._channel, [b"\n"], STREAMS)
        self._channel.sendall(json.dumps(job).encode() + b"\n")

    def stop(self) -> None:
        """Ask the processes to exit; `wait` returns when they have."""
        self.stopped = True
        self._channel.shutdown(socket.SHUT_WR)

    def wait(self) -> list[int]:
        """Wait for the processes and return their exit codes. If one fails, the others are ended.

        Raises:
            RunFault: If the template itself exited.
        """
        line = _line(self._channel)
        if not line:
            raise RunFault("the process that forks the ranks exited early (out of memory?); see its output.")
        codes: list[int] = json.loads(line)
        return codes


def share(modules: Sequence[str], variables: Mapping[str, str]) -> None:
    """Start a template for all launchers that this process starts, which ends with this process.

    Args:
        modules: The slow imports of their jobs; the first launcher makes the template import them.
        variables: The template's environment variables, in addition to this process's.
    """
    folder = tempfile.mkdtemp(prefix="gradwire-template-")
    path = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        _start(listener, modules, {**variables, PARENT: str(os.getpid())})
    os.environ[SHARED] = path


def _start(end: socket.socket, modules: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a template with its end of a connection, or with a socket where launchers connect."""
    command = [sys.executable, "-m", __name__, str(end.fileno()), *modules]
    # Not this process's standard output, whose reader may wait for its end; jobs have their launcher's.
    return subprocess.Popen(command, pass_fds=[end.fileno()], env={**os.environ, **variables}, stdout=2)


def main(end: socket.socket, modules: Sequence[str]) -> None:
    """Run the template: import, then serve the launcher at the other end, or those that connect."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        _accept(end, modules)
    else:
        _import(modules)
        serve(end)


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    if "numba" in sys.modules:
        sys.modules["numba"].njit("void()")(lambda: None)  # the first compilation imports for half a second
    gc.freeze()  # a collection in a fork would copy the pages of all objects


def _accept(listener: socket.socket, modules: Sequence[str]) -> None:
    """Fork a process for each launcher that connects, until the process that shares this template exits.

    The first one that connects makes it import.
    """
    parent = os.pidfd_open(int(os.environ[PARENT]))
    while parent not in connection.wait([listener, parent]):
        _import(modules)
        channel, _ = listener.accept()
        with channel:
            FORK.Process(target=_serve_one, args=(listener, channel)).start()
    shutil.rmtree(Path(listener.getsockname()).parent)


def _serve_one(listener: socket.socket, channel: socket.socket) -> None:
    listener.close()
    serve(channel)


def serve(channel: socket.socket) -> None:
    """Run a launcher's jobs, one after another, and send the exit codes of each.

    Args:
        channel: Socket to the launcher. End of file means stop: the launcher shut it down or exited.
    """
    while (job := _receive(channel)) is not None:
        os.environ.clear()
        os.environ.update(job["environment"], **{PARENT: str(os.getpid())})
        links.join_process(Path(f"/proc/{job['launcher']}/ns"))
        os.chdir(job["folder"])
        words = job["command"][1:]
        processes = [FORK.Process(target=_run, args=(channel, words, variables)) for variables in job["processes"]]
        try:
            for process in processes:
                process.start()
            _wait(processes, channel)
        finally:
            _end(processes)
        with suppress(BrokenPipeError):  # the launcher has exited
            channel.sendall(json.dumps([process.exitcode for process in processes]).encode() + b"\n")


def _receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next job, whose streams become this process's; None at the end of file."""
    first, streams, _, _ = socket.recv_fds(channel, 1, len(STREAMS))
    if not first:
        return None
    for stream, number in zip(streams, STREAMS, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    line = _line(channel)
    return json.loads(line) if line else None


def _line(channel: socket.socket) -> str:
    """A line from a socket; empty at the end of file."""
    with channel.makefile() as lines:
        return lines.readline()


def _run(channel: socket.socket, words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run ``python WORDS`` in a forked process."""
    channel.close()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(variables)
    if "torch" in sys.modules:  # OpenMP and MKL have read the template's environment
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    Path("/proc/self/comm").write_text(f"rank{os.environ.get('RANK', '')}")  # what top shows
    if words[0] == "-m":
        sys.argv = [words[1], *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def _wait(processes: Sequence[BaseProcess], channel: socket.socket) -> None:
    """Wait until all processes have exited, one has failed, or the launcher asks to stop.

    Each round looks at one snapshot of the exit codes: a process closes its sentinel before it has an exit code, so it
    may get one between two looks.
    """
    while None in (codes := [process.exitcode for process in processes]) and not any(codes):
        running = [process.sentinel for process, code in zip(processes, codes, strict=True) if code is None]
        if channel in connection.wait([channel, *running]):
            return


def _end(processes: Sequence[BaseProcess]) -> None:
    """Terminate running processes; kill those that have not exited after ``RANK_GRACE`` seconds."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.terminate()
    deadline = time.monotonic() + RANK_GRACE
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
