"""torchrun --nproc_per_node 4 pp.py 1f1b|gpipe|8|late: FSDP2 inside of pipeline stages that each have a reducer."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import hook


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its output."""
        return x + torch.tanh(self.layer(x))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
dp, pp = mesh["dp"], mesh["pp"]
way = sys.argv[1]
schedule, micro_batches = ScheduleGPipe if way == "gpipe" else Schedule1F1B, 8 if way == "8" else 4


def gradient(method: str | None) -> torch.Tensor:
    """All of this stage's gradient, in one step."""
    torch.manual_seed(pp.get_local_rank())
    model = nn.Sequential(Block(), Block())
    for module in (*model, model):
        fully_shard(module, mesh=dp)
    if method is None:
        model.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    else:
        reducer = Reducer(method, dp.get_group(), overlap=way != "late")
        hook(model, reducer)
    stage = PipelineStage(model, pp.get_local_rank(), 2, torch.device("cpu"), group=pp.get_group())
    running = schedule(stage, n_microbatches=micro_batches, loss_fn=F.mse_loss)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(dp.get_local_rank()))
    if pp.get_local_rank() == 0:
        running.step(x)
    else:
        running.step(target=torch.sin(x))
    if method is not None:
        assert reducer.finish()
    return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])


exact = gradient(None)
for method, bound in (("none", 1e-6), ("int8", 0.05)):
    error = float((gradient(method) - exact).norm() / exact.norm())
    assert error < bound, f"{method}: relative error {error}"
print("right")
