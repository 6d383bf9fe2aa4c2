"""torchrun --nproc_per_node 2 hooked_after.py: a model has one compressor or hook; a second is refused."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.base.errors import BadInput

dist.init_process_group("gloo")


def ddp() -> nn.Module:
    """A model of DistributedDataParallel."""
    return DistributedDataParallel(nn.Linear(4, 2))


def islands() -> nn.Module:
    """An FSDP2 model in islands of one rank."""
    return fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("after", "inside")))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An inner optimizer."""
    return torch.optim.SGD(model.parameters(), 0.1)


FIRST = {
    "DiLoCo": lambda model: gw.DiLoCo(sgd(model), model, sync_every=2),
    "OneBitAdam": lambda model: gw.OneBitAdam(model.parameters(), model, dense_steps=1),
    "compress_gradients": lambda model: gw.compress_gradients(model, "int8"),
    "comm_hook": lambda model: model.register_comm_hook(*gw.comm_hook(model, "int8")),
    "torch": lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
    "builtin": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
}
THEN = {
    "compress_gradients": lambda model: gw.compress_gradients(model, "int8"),
    "with the optimizer": lambda model: gw.compress_gradients(model, "int8", optimizer=sgd(model)),
    "comm_hook": lambda model: gw.comm_hook(model, "int8"),
    "DiLoCo": lambda model: gw.DiLoCo(sgd(model), model, sync_every=2),
}
OPTIMIZERS, HOOKS = ("DiLoCo", "OneBitAdam"), ("compress_gradients", "comm_hook", "torch", "builtin")
REFUSED = {
    **{(ddp, first, then): "has this DistributedDataParallel already" for first in OPTIMIZERS for then in [*THEN][:3]},
    **{(ddp, first, then): "has a communication hook already" for first in HOOKS[1:] for then in [*THEN][:2]},
    **{(ddp, first, "DiLoCo"): "which DiLoCo would never call" for first in HOOKS[1:]},
    (ddp, "compress_gradients", "DiLoCo"): "has a reducer already",
    (ddp, "compress_gradients", "compress_gradients"): "has a reducer already",
    (islands, "DiLoCo", "compress_gradients"): "has this FSDPLinear already",
    (islands, "compress_gradients", "DiLoCo"): "has a reducer already",
}
for (build, first, then), message in REFUSED.items():
    model = build()
    kept = FIRST[first](model)
    try:
        THEN[then](model)
    except BadInput as error:
        assert message in str(error), (first, then, error)
    else:
        raise AssertionError(f"{then} after {first} is accepted")

x = torch.ones(3, 4) + dist.get_rank()
model = ddp()
first = FIRST["DiLoCo"](model)
for name in ("DiLoCo", "OneBitAdam"):  # a second one takes over
    second = FIRST[name](model)
    given = model, first, second
    for net, old, new in (copy.deepcopy(given), pickle.loads(pickle.dumps(given)), given):
        net(x).sum().backward()
        before = [p.detach().clone() for p in net.parameters()]
        try:
            old.step()
        except BadInput as error:
            assert f"a {name} was built for the model of this DiLoCo afterwards" in str(error), error
        else:
            raise AssertionError(f"DiLoCo steps though {name} has its model")
        assert all(map(torch.equal, net.parameters(), before))
        new.step()
        assert not any(map(torch.equal, net.parameters(), before))
del second, given, new
first.step()
print("right")
