"""torchrun --nproc_per_node 2 ignored.py hook|comm_hook: what DDP is set to ignore keeps its own gradient."""

import sys
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import comm_hook
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import hook

dist.init_process_group("gloo")
rank, expert = dist.get_rank(), ["1.weight", "1.bias"]  # this rank's own
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
alone = deepcopy(net)
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, expert)
model, reducer = DistributedDataParallel(net), Reducer("none")
if sys.argv[1] == "comm_hook":
    model.register_comm_hook(*comm_hook(model, "none"))
else:
    hook(model, reducer)
xs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(each)) for each in range(2)]
model(xs[rank]).square().sum().backward()
if sys.argv[1] == "hook":
    assert reducer.finish()
gradients = []
for x in xs:
    alone.zero_grad()
    alone(x).square().sum().backward()
    gradients.append({name: p.grad for name, p in alone.named_parameters()})
for name, parameter in net.named_parameters():
    mean = (gradients[0][name] + gradients[1][name]) / 2
    torch.testing.assert_close(parameter.grad, gradients[rank][name] if name in expert else mean)
print("right")
