"""Pairs of ranks whose threads run only when nothing else does, so they still hold the last collective at the end."""

import os
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.comm.collectives import Reducer

PAIRS = 3


def fork_rank() -> int | None:
    """Return the number of this rank in a process that was forked off; None in the parent, after both have ended."""
    processes = []
    for rank in range(2):
        processes.append(os.fork())  # before torch has threads; the imports are paid for once
        if not processes[-1]:
            return rank
    print(*(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes), flush=True)
    return None


for _ in range(PAIRS):
    rendezvous = tempfile.mktemp()
    if (rank := fork_rank()) is not None:
        break
else:
    sys.exit()

dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
reducer = Reducer("none")
for step in range(4):
    if step == 2:
        cores = sorted(os.sched_getaffinity(0))
        core = cores[rank % len(cores)]
        os.sched_setaffinity(0, {core})
        for thread in Path("/proc/self/task").iterdir():
            if int(thread.name) != threading.get_native_id():
                os.sched_setaffinity(int(thread.name), {core})
                os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
    reducer.all_reduce(torch.ones(301), "gradient")
    reducer.finish()
