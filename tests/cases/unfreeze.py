"""torchrun --nproc_per_node 2 unfreeze.py diloco|onebit_adam: layers that are unfrozen later.

They train alike on all ranks, or they are refused.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from gradwire.base.errors import GradwireError
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import accumulation, named_parameters, optimizers, wrap

dist.init_process_group("gloo")
torch.manual_seed(0)
way = sys.argv[1]
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
start = net[0].requires_grad_(False).weight.clone()
reducer = Reducer("none", dense_steps=2 if way == "onebit_adam" else 0)
model = wrap(net, "ddp", reducer, device="cpu", average=False)
groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
optimizer = optimizers.build(way, model, groups, reducer, lr=0.1, **({"H": 2} if way == "diloco" else {}))

try:
    for step in range(8):
        if step == 4:  # as Lightning's BackboneFinetuning
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(net[0].parameters())})
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))
        with accumulation(model, last=True):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
except GradwireError as error:
    print("refused:", error)
else:
    weight = dict(named_parameters(model))["0.weight"].detach()
    weights = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(weights, weight)
    assert torch.equal(*weights) and not torch.equal(weight, start), "trained apart, or not at all"
    print("right")
