"""Norms of single samples' gradients while FSDP2 trains: torchrun --nproc_per_node 2 examples/sample_norms.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradwire

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
samples = gradwire.per_sample(model)

for step in range(20):
    inputs = torch.randn(8 * dist.get_world_size(), 32)  # the same on all ranks, which deal the rows out
    mine = inputs[dist.get_rank() :: dist.get_world_size()]
    with samples.norms() as norms:
        loss = nn.functional.mse_loss(model(mine), mine.sum(1, keepdim=True))
        loss.backward()
    largest = norms.gathered().max()  # of all ranks' samples; norms.values has this rank's
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}, largest norm {largest:.3f}", flush=True)
dist.destroy_process_group()
