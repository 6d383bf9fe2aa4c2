"""torchrun --nproc_per_node 2 reentrant.py: reentrant checkpointing under DDP with several buckets is right."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import hook


class Net(nn.Module):
    """Four checkpointed blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True).tanh()
        return x.square().sum()


def gradients(compressed: bool) -> list[torch.Tensor]:
    """Those of three steps."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.004)  # several buckets, as every model above 25 MB has
    reducer = Reducer("none")
    if compressed:
        hook(model, reducer)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        model(torch.randn(8, 32)).backward()
        if compressed:
            assert reducer.finish()
    return [parameter.grad for parameter in model.parameters()]


dist.init_process_group("gloo")
torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-5, atol=1e-5)
print("right")
