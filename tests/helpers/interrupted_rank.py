"""Two ranks, of which the second interrupts the first in mid-reduction and then exits: interrupted_rank.py WAY."""

import atexit
import os
import signal
import sys
import tempfile
import time

ended, ending = os.pipe()
atexit.register(os.write, ending, b".")  # before the imports: exit handlers run in reverse order

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from gradwire import comm_hook  # noqa: E402
from gradwire.comm.collectives import Reducer  # noqa: E402
from gradwire.comm.parallel import hook  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
way = sys.argv[1]
rendezvous = tempfile.mktemp()
parent = os.getpid()
rank = int(os.fork() == 0)  # before torch has threads; the imports are paid for once
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
reducer = Reducer("none")  # whose encoding compiles nothing
if way == "reducer":

    def step() -> None:
        reducer.all_reduce(torch.ones(300_001), "gradient")
        reducer.finish()

else:
    model = DistributedDataParallel(nn.Linear(601, 499))
    if way == "hook":
        hook(model, reducer)
    else:
        model.register_comm_hook(*comm_hook(model, "none"))

    def step() -> None:
        model(torch.ones(3, 601)).square().mean().backward()
        if way == "hook":
            reducer.finish()


for _ in range(2):  # DDP itself communicates in its second forward pass
    step()
if rank == 1:
    time.sleep(0.5)  # the first rank waits for this one's gradient
    print(time.time(), flush=True)
    os.kill(parent, signal.SIGINT)
    os.close(ending)
    os.read(ended, 1)
    os._exit(0)  # its connections close while the first rank's interpreter ends
step()
