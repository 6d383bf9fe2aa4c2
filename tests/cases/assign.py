"""torchrun --nproc_per_node 2 assign.py: parameters assigned after hook get their gradients, or are refused."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire.base.errors import GradwireError
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import hook

dist.init_process_group("gloo")
torch.manual_seed(0)
model, alone = (nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)) for _ in range(2))
alone.load_state_dict(model.state_dict())
for module in (model[0], model[2], model):
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
reducer = Reducer("none")
hook(model, reducer)
xs = [torch.randn(64, 512) for _ in range(2)]  # equal on both ranks
try:
    model.load_state_dict({name: kept.detach().clone() for name, kept in model.state_dict().items()}, assign=True)
    for x in xs:  # two synchronised backward passes, one step
        model(x).square().mean().backward()
    assert reducer.finish()
except GradwireError as error:
    print("refused:", error)
else:
    sum(alone(x).square().mean() for x in xs).backward()
    for parameter, exact in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), exact.grad, rtol=1e-4, atol=1e-7)
    print("right")
