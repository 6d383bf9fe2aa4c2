"""Benchmarks that shape links start, and print their tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.launch import links

ROOT = Path(__file__).parents[1]
SHORT = {
    "bench_overlap.py": [
        "--links",
        "100mbit",
        "--strategies",
        "ddp",
        "--cells",
        "int8",
        "onebit_adam",
        "--rounds",
        "2",
    ],
    "bench_links.py": ["--link", "100mbit", "--numels", "1000", "--rounds", "2"],
}


@pytest.mark.full
@pytest.mark.skipif(links.probe().way is None, reason="needs network namespaces")
@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_on_links_prints_its_table(name):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / name), *SHORT[name]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) >= 3, done.stdout
