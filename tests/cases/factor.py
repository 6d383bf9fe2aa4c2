"""torchrun --nproc_per_node 2 factor.py: the divide factor that a model's owner has set holds, or is refused."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire.base.errors import GradwireError
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import hook

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
x = torch.randn(5, 33, generator=torch.Generator().manual_seed(dist.get_rank()))


def gradient(factor: float, compressed: bool) -> torch.Tensor:
    """All of a model's gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3))
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    reducer = Reducer("none")
    if compressed:
        hook(model, reducer)
    model(x).square().sum().backward()
    if compressed:
        reducer.finish()
    return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])


for factor in (1.0, 8.0):
    expected = gradient(factor, False)
    try:
        torch.testing.assert_close(gradient(factor, True), expected)
    except GradwireError as error:
        print("refused:", error)
    else:
        print("right")
