"""Run `grads lds`, and kill it with SIGKILL while the file of a given subset is written."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager

from gradwire import cli
from gradwire.base import files

if __name__ == "__main__":
    fatal = f"{sys.argv[1]}.json"
    whole = files.whole

    @contextmanager
    def whole_until_killed(path):
        with whole(path) as part:
            if path.name == fatal:
                part.write_bytes(b"half a file")
                os.kill(os.getpid(), signal.SIGKILL)
            yield part

    files.whole = whole_until_killed
    sys.exit(cli.main(sys.argv[2:]))
