"""Tokenize a corpus again and again, killed at its writes in turn: ``data_kill.py CORPUS FOLDER [STRIDE]``.

Each attempt is a forked child that dies by SIGKILL just before or just after its n-th rename, then a second child that
finishes the work. Prints one line per attempt: a digest of all resulting files. With a stride above 1 it takes every
STRIDE-th write, and two kills before one alternate with two kills after one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from pathlib import Path

from data_samples import files_of, tokenize_words

import gradwire.lm.data.writer  # noqa: F401  before the forks, which then start at once
from gradwire import cli


def child(words: list[str], die_at: int | None, after: bool) -> int:
    """Run a command in a forked child that dies at its ``die_at``-th rename; return its wait status."""
    pid = os.fork()
    if pid == 0:
        sys.stdout = sys.stderr  # stdout is for the digests
        os.fsync = lambda _: None  # a killed process loses nothing that it has handed to the kernel
        if die_at is not None:
            _die_at(die_at, after)
        os._exit(cli.main(words))
    return os.waitpid(pid, 0)[1]


def _die_at(number: int, after: bool) -> None:
    rename, calls = Path.replace, 0

    def replace(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        renamed = rename(self, target)
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return renamed

    Path.replace = replace


def main(corpus: Path, folder: Path, stride: int) -> None:
    """Kill at the 1st write, the (1 + stride)-th, …, until a child survives its number."""
    words = tokenize_words(corpus, folder)
    for turn, number in enumerate(range(1, 1000, stride)):
        for after in (False, True) if stride == 1 else (turn % 4 > 1,):
            shutil.rmtree(folder, ignore_errors=True)
            status = child(words, number, after)
            if status == 0:
                return
            assert os.WTERMSIG(status) == signal.SIGKILL, status
            assert child(words, None, False) == 0
            content = files_of(folder)
            print(number, hashlib.sha256(repr(content).encode()).hexdigest(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
