"""torchrun --nproc_per_node 2 unreduced.py: a step in which nothing was reduced does not pass."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.base.errors import GradwireError
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import hook

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 2))
reducer = Reducer("int8", nonfinite="raise")
hook(model, reducer)
x = torch.full((3, 4), float(dist.get_rank() + 1))
model(x).sum().backward()
assert reducer.finish()
model.zero_grad()
model.module(x).mul(float("nan") if dist.get_rank() else 1.0).sum().backward()  # not through DDP's forward
try:
    passed = reducer.finish()
except GradwireError as error:
    print("refused:", error)
else:
    raise AssertionError(f"finish says {passed} of gradient {model.module.bias.grad.tolist()}")
