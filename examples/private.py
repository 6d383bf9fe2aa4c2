"""Private training under DDP: torchrun --nproc_per_node 2 examples/private.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

SAMPLES, RATE = 512, 1 / 16
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
inputs = torch.randn(SAMPLES, 32)[dist.get_rank() :: dist.get_world_size()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
private = gradwire.make_private(
    model, optimizer, noise_multiplier=1.0, max_grad_norm=8.0, batch_size=int(SAMPLES * RATE), sample_rate=RATE
)
torch.manual_seed(1 + dist.get_rank())
for step in range(80):
    batch = inputs[torch.rand(len(inputs)) < RATE]  # Poisson sampling
    losses = (model(batch) - batch.sum(1, keepdim=True)).square().mean(1)  # [B], one of each sample
    private.backward(losses)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 20 == 19:
        print(f"step {step + 1}: loss {losses.mean().item():.3f}, epsilon {private.epsilon(1e-5):.2f}", flush=True)
dist.destroy_process_group()
