"""torchrun --nproc_per_node 4 extra_group.py ddp|hsdp|tp|diloco|sync: some ranks have more groups."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import wrap
from gradwire.comm.parallel.verify import SyncCheck

dist.init_process_group("gloo", timeout=timedelta(seconds=15))
way, rank = sys.argv[1], dist.get_rank()
for members in ([0], [0, 3], [0]):
    dist.new_group(members)  # all ranks call it
pairs = [dist.new_group([n, n + 2], timeout=timedelta(seconds=5)) for n in (0, 1)]
x = torch.randn(5, 8, generator=torch.Generator().manual_seed(rank if way != "tp" else rank // 2))


def built() -> nn.Sequential:
    """The same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))


def trained(compressed: bool) -> torch.Tensor:
    """All parameters after two steps."""
    model = built()
    if way in ("ddp", "diloco"):
        model = DistributedDataParallel(model, process_group=pairs[rank % 2])
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"{way} rows", f"{way} columns"))
        if way == "tp":
            parallelize_module(model, mesh[f"{way} columns"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh if way == "hsdp" else mesh[f"{way} rows"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if compressed and way == "diloco":
        optimizer = gw.DiLoCo(optimizer, model, sync_every=1, outer={"lr": 1.0, "momentum": 0.0})
    elif compressed:
        gw.compress_gradients(model, "none", optimizer=optimizer, algorithm="exchange")
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([p.detach().flatten() for p in whole])


if way == "sync":
    model = wrap(built(), "ddp", Reducer("int8", pairs[rank % 2]))
    check = SyncCheck(model, torch.optim.SGD(model.parameters(), 0.1), every=1, patience_s=4)
    check.before(0)
    check.after(0)
else:
    torch.testing.assert_close(trained(True), trained(False))
print("right")
