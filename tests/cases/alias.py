"""torchrun --nproc_per_node 2 alias.py: a snapshot in memory is loaded more than once."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(10, 3)
adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer = gw.DiLoCo(adamw, model, sync_every=3, compressor="onebit")


def train(steps: range) -> torch.Tensor:
    """The weight after these steps."""
    for step in steps:
        x = torch.randn(8, 10, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().clone()


train(range(6))
states = model.state_dict(), optimizer.state_dict(), optimizer.rank_state(), optimizer.reducer.state_dict()
loads = model.load_state_dict, optimizer.load_state_dict, optimizer.load_rank_state, optimizer.reducer.load_state_dict
saved = copy.deepcopy(states)
expected = train(range(6, 12))
for _ in range(3):
    for load, state in zip(loads, saved, strict=True):
        load(state)
    assert torch.equal(train(range(6, 12)), expected)
print("right")
