"""torchrun --nproc_per_node 2 alias.py: a snapshot in memory is loaded more than once."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import accumulation, optimizers, wrap

dist.init_process_group("gloo")
torch.manual_seed(0)
reducer = Reducer("onebit", error_feedback=True)
model = wrap(nn.Linear(10, 3), "ddp", reducer, device="cpu", average=False)
groups = [{"params": list(model.parameters())}]
optimizer = optimizers.build("diloco", model, groups, reducer, lr=0.01, H=3)


def train(steps: range) -> torch.Tensor:
    """The weight after these steps."""
    for step in steps:
        x = torch.randn(8, 10, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        with accumulation(model, last=True):
            model(x).square().mean().backward()
        if optimizer.exchange(max_norm=1.0)[1]:
            optimizer.step()
        optimizer.zero_grad()
    return model.module.weight.detach().clone()


train(range(6))
states = model.state_dict(), optimizer.state_dict(), optimizer.rank_state(), reducer.state_dict()
loads = model.load_state_dict, optimizer.load_state_dict, optimizer.load_rank_state, reducer.load_state_dict
saved = copy.deepcopy(states)
expected = train(range(6, 12))
for _ in range(3):
    for load, state in zip(loads, saved, strict=True):
        load(state)
    assert torch.equal(train(range(6, 12)), expected)
print("right")
