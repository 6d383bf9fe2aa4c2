"""torchrun --nproc_per_node 2 adamw.py: 1-bit Adam continues from AdamW's state, or refuses it when it is loaded."""

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.base.errors import BadInput

dist.init_process_group("gloo")
model = nn.Linear(6, 2)
adamw = torch.optim.AdamW(model.parameters())
model(torch.randn(3, 6)).sum().backward()
adamw.step()
adamw.zero_grad()
optimizer = gw.OneBitAdam(model.parameters(), model, dense_steps=3, max_norm=1.0, lr=1e-3)
try:
    optimizer.load_state_dict(adamw.state_dict())
except BadInput as error:
    print("refused:", error)
else:
    for _ in range(6):
        model(torch.randn(3, 6)).square().sum().backward()
        optimizer.step()
    print("right")
