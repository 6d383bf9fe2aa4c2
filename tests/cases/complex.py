"""torchrun --nproc_per_node 2 complex.py hook|comm_hook|naive|bucket: complex gradients are averaged, or refused."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import comm_hook
from gradwire.base.errors import GradwireError
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import hook, wrap

dist.init_process_group("gloo")
way, rank = sys.argv[1], dist.get_rank()
model = nn.Linear(1, 1, bias=False, dtype=torch.cfloat)
with torch.no_grad():
    model.weight.fill_(1 + 1j)
try:
    if way in ("naive", "bucket"):
        model = wrap(model, way, Reducer("none"), device="cpu")
    else:
        model = DistributedDataParallel(model)
        if way == "hook":
            hook(model, Reducer("none"))
        else:
            model.register_comm_hook(*comm_hook(model, "none"))
    model(torch.full((1, 1), (1 + 2j) * (1 + rank))).abs().square().sum().backward()
except GradwireError as error:
    print("refused:", error)
else:
    [parameter] = model.parameters()
    assert abs(parameter.grad.item() - (25 + 25j)) < 1e-4, f"{parameter.grad.item()}, of 10+10j and 40+40j"
    print("right")
