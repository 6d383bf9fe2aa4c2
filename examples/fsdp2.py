"""A model that FSDP2 has sharded already, gradients by top-k: torchrun --nproc_per_node 2 examples/fsdp2.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire.comm.collectives import Reducer
from gradwire.comm.compressors import build
from gradwire.comm.parallel import hook

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
teacher = torch.randn(32, 1)
torch.manual_seed(1 + dist.get_rank())  # every rank has data of its own

mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
reducer = Reducer(build("topk+int8", density=0.1), error_feedback=True)
hook(model, reducer)  # before the first forward pass; the rest of the loop is FSDP2's own
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(20):
    inputs = torch.randn(64, 32)
    loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
    loss.backward()
    if reducer.finish():  # once per step, on every rank
        optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        sent, raw = reducer.traffic["sent"], reducer.traffic["raw"]
        print(f"step {step + 1}: loss {loss.item():.3f}, {sent:,} bytes sent of {raw:,}", flush=True)
dist.destroy_process_group()
