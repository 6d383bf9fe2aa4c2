"""Accelerate with compressed gradients: torchrun --nproc_per_node 2 examples/with_accelerate.py.

It needs accelerate: pip install 'gradwire[trainer]'.
"""

import torch
from accelerate import Accelerator
from torch import nn

import gradwire

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
compressor = {"method": "topk", "density": 0.1}
compression = gradwire.compress_gradients(model, compressor, optimizer=optimizer, error_feedback=True)
generator = torch.Generator().manual_seed(accelerator.process_index)
for step in range(40):
    x = torch.randn(64, 32, generator=generator)
    with accelerator.accumulate(model):
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if step % 10 == 9:
        accelerator.print(f"loss {loss.item():.3f}")
accelerator.print(f"{compression.traffic['sent']:,} bytes sent of {compression.traffic['raw']:,}")
accelerator.end_training()
