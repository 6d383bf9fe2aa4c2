"""One rank of an example, as torchrun would start it, in a process that has imported torch already."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def run(script: Path, rank: int, world_size: int, port: int, printed: Path) -> None:
    """Run a script as ``__main__``; what it prints goes to a file."""
    os.environ |= {
        "RANK": str(rank),
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
        runpy.run_path(str(script), run_name="__main__")
