"""torchrun --nproc_per_node 2 adamw.py: 1-bit Adam continues from AdamW's state, or refuses it when it is loaded."""

import torch
import torch.distributed as dist
from torch import nn

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import accumulation, optimizers, wrap

dist.init_process_group("gloo")
net = nn.Linear(6, 2)
adamw = torch.optim.AdamW(net.parameters())
net(torch.randn(3, 6)).sum().backward()
adamw.step()
adamw.zero_grad()
reducer = Reducer("onebit", dense_steps=3)
model = wrap(net, "ddp", reducer, device="cpu", average=False)
optimizer = optimizers.build("onebit_adam", model, [{"params": list(model.parameters())}], reducer, lr=1e-3)
try:
    optimizer.load_state_dict(adamw.state_dict())
except BadInput as error:
    print("refused:", error)
else:
    for _ in range(6):
        with accumulation(model, last=True):
            model(torch.randn(3, 6)).square().sum().backward()
        if optimizer.exchange(1.0)[1]:
            optimizer.step()
    print("right")
