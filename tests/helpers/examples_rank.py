"""One rank of an example, as torchrun would start it, in a process that has imported torch already."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def run(arguments: list[str], rank: int, world_size: int, port: int, printed: Path) -> None:
    """Run a script as ``__main__`` with its arguments; what it prints goes to a file."""
    os.environ |= {
        "RANK": str(rank),
        "GROUP_RANK": "0",
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    with printed.open("w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
