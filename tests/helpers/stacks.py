"""Models that a user has parallelized over meshes, and what tests and the table of stacks train them with.

A builder takes a number of ranks and returns the model and the number of this rank's samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

WIDTH, HIDDEN = 12, 8


class Block(nn.Module):
    """Two layers that tensor parallelism splits, and a norm that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Experts(nn.Module):
    """Four experts whose outputs are summed; expert parallelism gives each rank some of them, along dimension 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, 6) / 4)

    def forward(self, x):
        mine = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.einsum("bi,eij->bj", x, mine)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.experts(x)


def forget_groups() -> None:
    """DTensor caches collectives by mesh, and the groups of the one before may have ended."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()


SHARED: list[dict[tuple[object, ...], DeviceMesh]] = []


@contextmanager
def shared_meshes() -> Iterator[None]:
    """Inside, models have one mesh of each shape: connections are half of what a short training costs."""
    forget_groups()
    SHARED.append({})
    try:
        yield
    finally:
        SHARED.pop()


def mesh_of(*shape: int, names: str) -> DeviceMesh:
    if SHARED and (shape, names) in SHARED[-1]:
        return SHARED[-1][shape, names]
    if not SHARED:
        forget_groups()
    made = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split()))
    if SHARED:
        SHARED[-1][shape, names] = made
    return made


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(5)
    return kind()


def sharded(model: nn.Module, mesh, **options) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def split(model: nn.Module, mesh) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def hsdp(world: int, islands: int) -> tuple[nn.Module, int]:
    mesh = mesh_of(islands, world // islands, names="replicas shards")
    return sharded(net(), mesh), dist.get_rank()


def tensor_fsdp(world: int) -> tuple[nn.Module, int]:
    mesh = mesh_of(world // 2, 2, names="dp tp")
    return sharded(split(net(), mesh["tp"]), mesh["dp"]), mesh["dp"].get_local_rank()


def tensor_hsdp(world: int) -> tuple[nn.Module, int]:
    mesh = mesh_of(world // 2, 1, 2, names="replicas shards tp")
    return sharded(split(net(), mesh["tp"]), mesh["replicas", "shards"]), mesh["replicas"].get_local_rank()


def tensor_ddp(world: int) -> tuple[nn.Module, int]:
    mesh = mesh_of(world // 2, 2, names="dp tp")
    model = split(net(), mesh["tp"])
    _pre_dp_module_transform(model)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp")), mesh["dp"].get_local_rank()


def together(world: int) -> tuple[nn.Module, int]:
    """Two modules that one call shards as one group."""
    mesh, model = mesh_of(world, names="dp"), net()
    fully_shard([model.blocks[1], model.head], mesh=mesh)
    return fully_shard(model, mesh=mesh), dist.get_rank()


def replicated(world: int) -> tuple[nn.Module, int]:
    mesh = mesh_of(world, names="replicas")
    model = net()
    for block in model.blocks:
        replicate(block, mesh=mesh)
    return replicate(model, mesh=mesh), dist.get_rank()


def columns(world: int) -> tuple[nn.Module, int]:
    mesh = mesh_of(world, names="dp")
    place = {"shard_placement_fn": lambda parameter: Shard(1) if parameter.ndim == 2 else Shard(0)}
    return sharded(net(), mesh, **place), dist.get_rank()


def experts(world: int) -> tuple[nn.Module, int]:
    """Dense parameters over all ranks; experts split over pairs, and each part sharded over the other ranks.

    Both meshes have a dimension of the same name.
    """
    dense = mesh_of(world, names="shards")
    mesh = mesh_of(world // 2, 2, names="shards ep")
    model = net(Mixture)
    part = distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(0)])
    model.experts.weight = nn.Parameter(part)
    fully_shard(model.experts, mesh=mesh["shards"], shard_placement_fn=lambda parameter: Shard(1))
    return sharded(model, dense), dist.get_rank()


STACKS = {
    "hsdp": lambda world: hsdp(world, 2),
    "hsdp, one island": lambda world: hsdp(world, 1),
    "hsdp, islands of one": lambda world: hsdp(world, world),
    "tp x fsdp": tensor_fsdp,
    "tp x hsdp": tensor_hsdp,
    "tp x ddp": tensor_ddp,
    "replicate": replicated,
    "columns": columns,
    "together": together,
    "experts": experts,
}


def inputs(sample: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + sample + 1))


def loss_of(model: nn.Module, sample: int, step: int) -> torch.Tensor:
    outputs = model(inputs(sample, step))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(output.square().mean() for output in outputs)


def values(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies of named parameters, whole where they are DTensors."""
    named = {name.removeprefix("module."): parameter.detach() for name, parameter in parameters}
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in named.items()}
