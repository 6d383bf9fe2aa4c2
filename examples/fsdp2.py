"""A model that FSDP2 has sharded, gradients by top-k: torchrun --nproc_per_node 2 examples/fsdp2.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
teacher = torch.randn(32, 1)
torch.manual_seed(1 + dist.get_rank())  # every rank has its own data

mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
compression = gradwire.compress_gradients(
    model, {"method": "topk+int8", "density": 0.1}, optimizer=optimizer, error_feedback=True
)  # before the first forward pass; the rest of the script is torch's

for step in range(20):
    inputs = torch.randn(64, 32)
    loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        sent, raw = compression.traffic["sent"], compression.traffic["raw"]
        print(f"step {step + 1}: loss {loss.item():.3f}, {sent:,} bytes sent of {raw:,}", flush=True)
dist.destroy_process_group()
