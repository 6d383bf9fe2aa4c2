"""Triton's compiler takes what its interpreter runs, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from samples import METHODS

from gradwire.comm.compressors import kernels

pytest.importorskip("triton")
EXTRA = {"projections"}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_cuda_kernels_compile_for_every_architecture_and_keep_their_numbers_in_registers():
    names = sorted({name for name, _ in METHODS if kernels.load("cuda", name) is not kernels.REFERENCE} | EXTRA)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("helpers") / "ahead_of_time.py"), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert {(name, capability) for name, _, capability, *_ in compiled} == set(product(names, ("80", "90", "100")))
    assert [line for line in compiled if line[-1] != "0"] == []
