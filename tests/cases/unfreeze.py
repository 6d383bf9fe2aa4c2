"""torchrun --nproc_per_node 2 unfreeze.py naive|bucket|ddp|fsdp2|diloco|onebit_adam: layers that are unfrozen later.

They train alike on all ranks, or they are refused or named in a warning.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from gradwire.base.errors import GradwireError
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import accumulation, named_parameters, optimizers, wrap

dist.init_process_group("gloo")
torch.manual_seed(0)
way, local = sys.argv[1], sys.argv[1] in ("diloco", "onebit_adam")
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
start = net[0].requires_grad_(False).weight.clone()
reducer = Reducer("none", dense_steps=2 if way == "onebit_adam" else 0)
model = wrap(net, "ddp" if local else way, reducer, device="cpu", average=not local)
groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
options = {"H": 2} if way == "diloco" else {}
if local:
    optimizer = optimizers.build(way, model, groups, reducer, lr=0.1, **options)
else:
    optimizer = torch.optim.SGD(groups, lr=0.1)


def train(step: int) -> None:
    """Take a step."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))
    with accumulation(model, last=True):
        model(x).square().mean().backward()
    if local or reducer.finish():
        optimizer.step()
    optimizer.zero_grad()


try:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        for step in range(8):
            if step == 4:  # as Lightning's BackboneFinetuning
                net[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(net[0].parameters())})
            train(step)
except GradwireError as error:
    print("refused:", error)
else:
    weight = dict(named_parameters(model))["0.weight"].detach()
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    weights = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(weights, weight)
    if any("0.weight" in str(one.message) for one in noted):
        print("refused:", [str(one.message) for one in noted])
    else:
        assert torch.equal(*weights) and not torch.equal(weight, start), "trained apart, or not at all"
        print("right")
