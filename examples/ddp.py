"""A training script of one's own under DDP, gradients as 8-bit numbers: torchrun --nproc_per_node 2 examples/ddp.py."""

import torch
import torch.distributed as dist
from torch import nn

from gradwire.comm.collectives import Reducer
from gradwire.comm.compressors import build
from gradwire.comm.parallel import accumulation, clip_grad_norm, wrap

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
teacher = torch.randn(32, 1)
torch.manual_seed(1 + dist.get_rank())  # every rank has data of its own

reducer = Reducer(build("int8", block=64), error_feedback=True)
model = wrap(model, "ddp", reducer, device="cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(20):
    for micro in range(2):
        inputs = torch.randn(64, 32)
        with accumulation(model, last=micro == 1):  # gradients travel once per step
            loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
            (loss / 2).backward()
    if reducer.finish():  # once per step, on every rank
        clip_grad_norm(model, 10.0)
        optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        sent, raw = reducer.traffic["sent"], reducer.traffic["raw"]
        print(f"step {step + 1}: loss {loss.item():.3f}, {sent:,} bytes sent of {raw:,}", flush=True)
dist.destroy_process_group()
