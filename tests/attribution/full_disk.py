"""Run gradwire where no file may grow beyond a size: ``python full_disk.py BYTES VERB ...``."""

from __future__ import annotations

import resource
import subprocess
import sys

from gradwire import cli


def run(size: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a verb in a process of its own."""
    return subprocess.run([sys.executable, __file__, str(size), *map(str, words)], capture_output=True, text=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
    sys.exit(cli.main(sys.argv[2:]))
