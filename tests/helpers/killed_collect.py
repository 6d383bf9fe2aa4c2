"""Run a command of `grads`, and kill it with SIGKILL while the store's file of a given number is written."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager

from gradwire import cli
from gradwire.attribution.store import store

if __name__ == "__main__":
    left = int(sys.argv[1])
    write = store.atomic_write

    @contextmanager
    def write_until_killed(path):
        global left
        with write(path) as part:
            if left == 0:
                part.write_bytes(b"half a file")
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            yield part

    store.atomic_write = write_until_killed
    sys.exit(cli.main(sys.argv[2:]))
