"""One Slurm for all tests in here; what is left of it afterwards is a failure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import cluster
import pytest


@pytest.fixture(scope="session")
def slurm() -> Iterator[Path]:
    """The folder with the daemons' logs."""
    with cluster.cluster() as folder:
        yield folder
    assert left_over() == []


def left_over() -> list[str]:
    """Slurm's daemons and its links in /etc/slurm."""
    commands = [path.read_bytes().replace(b"\0", b" ").decode() for path in Path("/proc").glob("[0-9]*/cmdline")]
    daemons = [line for line in commands if re.match(r"\S*(munged|slurmctld|slurmd|slurmstepd)\b", line)]
    return daemons + [str(path) for path in cluster.ETC.iterdir() if path.is_symlink()]
