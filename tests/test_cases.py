"""Small programs of other people's kinds, each run as its first line says: right, or refused by a clear error.

A program asserts what must hold, and every rank's last line says ``right`` or ``refused``. It runs in the pool of
ranks, where torch is imported and a process group of as many ranks exists; nothing else differs from torchrun.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

CASES = Path(__file__).with_name("cases")
FIRST = re.compile(r'"""(?:torchrun --nproc_per_node (?P<ranks>\d)|python) (?P<name>\S+?\.py)(?: (?P<ways>\S+))?: ')
LONG = {
    ("deepcopy_optimizer", "both"),
    ("threads", "hook"),
    ("skipped", "feedback"),
    ("skipped", "zero"),
    ("skipped", "fills"),
    ("skipped", "ddp"),
    *(("defaults", way) for way in ("bfloat16", "float64", "meta", "inference", "deterministic")),
}


def cases():
    """Every program with its number of ranks and its argument, by a name."""
    for path in sorted(CASES.glob("*.py")):
        says = FIRST.match(path.read_text())
        assert says is not None and says["name"] == path.name, f"the first line of {path.name} says how to run it"
        for way in (says["ways"] or "").split("|"):
            marks = [pytest.mark.full] if (path.stem, way) in LONG else []
            yield pytest.param(path, int(says["ranks"] or 1), way, marks=marks, id=f"{path.stem} {way}".strip())


def execute(rank, world, group, path, way):
    """The output of a program on this rank."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    with contextlib.ExitStack() as stack:
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(mock.patch.dict(os.environ, {name: str(value) for name, value in environment.items()}))
        stack.enter_context(mock.patch.object(dist, "init_process_group"))  # the group is there
        stack.enter_context(mock.patch.object(sys, "argv", [str(path), *way.split()]))
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue().splitlines()


@pytest.mark.parametrize(("path", "ranks", "way"), cases())
def test_a_case_is_right_or_refused(world, path, ranks, way):
    for printed in world(ranks).run(execute, path, way):
        assert printed and printed[-1].startswith(("right", "refused: ")), printed
