"""A training script under DDP, gradients as 8-bit numbers: torchrun --nproc_per_node 2 examples/ddp.py."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)))
teacher = torch.randn(32, 1)
torch.manual_seed(1 + dist.get_rank())  # every rank has its own data

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
compression = gradwire.compress_gradients(
    model, {"method": "int8", "block": 64}, optimizer=optimizer, error_feedback=True
)  # the rest of the script is torch's

for step in range(20):
    for micro in range(2):
        inputs = torch.randn(64, 32)
        with nullcontext() if micro == 1 else model.no_sync():  # gradients travel once per step
            loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
            (loss / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        sent, raw = compression.traffic["sent"], compression.traffic["raw"]
        print(f"step {step + 1}: loss {loss.item():.3f}, {sent:,} bytes sent of {raw:,}", flush=True)
dist.destroy_process_group()
