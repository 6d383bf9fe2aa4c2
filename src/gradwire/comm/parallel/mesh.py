"""Device mesh of the ranks, with one dimension per kind of parallelism, and a rank's part of a tensor on it.

``dp``: each rank has its own samples. ``tp``: layers are split. ``cp``: sequences are split. ``pp``: a rank has some of
the layers. Only ``dp`` is implemented.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gradwire.base.errors import BadInput, unknown
from gradwire.comm.collectives.ops import Group
from gradwire.comm.torch_internals import shards_of

DIMENSIONS = {"dp": "data", "tp": "tensor", "cp": "context", "pp": "pipeline"}


def build(device_type: str, group: Group = None, *, dp: int | None = None, **others: int) -> DeviceMesh:
    """Build a mesh with the dimension ``dp`` from the ranks of a process group.

    The mesh reuses the group. Dimensions of size 1 have no peers and are left out.

    Args:
        device_type: ``cpu`` or ``cuda``.
        group: The ranks; None is the default group.
        dp: Number of data-parallel ranks; None means all.
        others: Sizes of ``tp``, ``cp`` and ``pp``, which must be 1.

    Raises:
        BadInput: If a dimension is unknown, one other than ``dp`` is larger than 1, or ``dp`` is not the group's size.
    """
    world = dist.get_world_size(group)
    check(world, {"dp": world if dp is None else dp, **others})
    return DeviceMesh.from_group(dist.group.WORLD if group is None else group, device_type, mesh_dim_names=("dp",))


def check(world: int, sizes: dict[str, int]) -> None:
    """Check that a mesh can be built from ``world`` ranks.

    Raises:
        BadInput: As `build`.
    """
    for name, size in sizes.items():
        if name not in DIMENSIONS:
            raise unknown("dimension of the mesh", name, DIMENSIONS)
        if name != "dp" and size != 1:
            raise BadInput(
                f"the mesh has {name} = {size}, but {DIMENSIONS[name]} parallelism is not implemented; only dp may be "
                "larger than 1."
            )
    if sizes["dp"] != world:
        raise BadInput(f"the mesh has dp = {sizes['dp']}, but there are {world} ranks.")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, another tensor as it is; both share memory with it."""
    if (shards := shards_of(tensor)) is not None:
        return shards[0].tensor if shards else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """Return where this rank's shard of a tensor begins along its first dimension; 0 of one that is not sharded."""
    if (shards := shards_of(tensor)) is not None:
        return int(shards[0].metadata.shard_offsets[0]) if shards else 0
    if not isinstance(tensor, DTensor):
        return 0
    (dim,) = (dim for dim, placement in enumerate(tensor.placements) if placement == Shard(0))
    mesh = tensor.device_mesh
    return min(mesh.get_local_rank(dim) * -(-tensor.shape[0] // mesh.size(dim)), tensor.shape[0])


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether an optimizer would use this rank's part of a gradient; one of zeros is that of an unused parameter."""
    return parameter.grad is not None and bool(local(parameter.grad).count_nonzero())
