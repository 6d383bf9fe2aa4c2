"""Launches of the command `probe` of `rank_command.py`, as processes of their own, and what they leave."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gradwire.bench.launch.ranks import THREADS

PROBE = Path(__file__).with_name("rank_command.py")
CLEAN = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", *THREADS)}


def words(output: Path, ranks: dict, *flags: str, launcher: str = "spawn", probe: tuple[str, ...] = ()) -> list[str]:
    """The arguments of `gradwire launch`."""
    start = ["launch", "--world_size", "2", "--launcher", launcher, *flags]
    return [*start, "--", "probe", "--output_dir", str(output), "--ranks", json.dumps(ranks), *probe]


def command(output: Path, ranks: dict, *flags: str, **options) -> list[str]:
    """The command line of the launcher."""
    return [sys.executable, str(PROBE), *words(output, ranks, *flags, **options)]


def failure(output: Path) -> dict:
    return json.loads((output / "probe.failed.json").read_text())


def started(output: Path) -> dict[str, dict]:
    return {rank["RANK"]: rank for rank in map(json.loads, (p.read_text() for p in output.glob("started*.json")))}


def left_behind(output: Path) -> list[dict]:
    """The ranks that still run."""
    return [rank for rank in started(output).values() if Path(f"/proc/{rank['pid']}").exists()]


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
