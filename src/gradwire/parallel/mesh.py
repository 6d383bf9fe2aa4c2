"""The ranks as a mesh, whose dimensions are the ways to share a model out.

``dp``: each rank has its own samples. ``tp``: layers are split. ``cp``: sequences are split. ``pp``: a rank has some of
the layers. Only the first exists so far.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradwire.collectives.ops import Group
from gradwire.errors import BadInput, unknown

DIMENSIONS = {"dp": "data", "tp": "tensor", "cp": "context", "pp": "pipeline"}


def build(device_type: str, group: Group = None, *, dp: int | None = None, **others: int) -> DeviceMesh:
    """The ranks of a process group as a mesh with the dimension ``dp``, which takes that group over.

    A dimension of size 1 has no peers, so it gets no process group and does not appear.

    Args:
        device_type: ``cpu`` or ``cuda``.
        group: The ranks; None is the default group.
        dp: Ranks that share the samples; None means all.
        others: Sizes of ``tp``, ``cp`` and ``pp``, which have to be 1.

    Raises:
        BadInput: If a dimension is unknown, is larger than 1 without being ``dp``, or ``dp`` is not all of the ranks.
    """
    world = dist.get_world_size(group)
    check(world, {"dp": world if dp is None else dp, **others})
    return DeviceMesh.from_group(dist.group.WORLD if group is None else group, device_type, mesh_dim_names=("dp",))


def check(world: int, sizes: dict[str, int]) -> None:
    """Refuse a mesh that cannot be built from ``world`` ranks.

    Raises:
        BadInput: As `build`.
    """
    for name, size in sizes.items():
        if name not in DIMENSIONS:
            raise unknown("dimension of the mesh", name, DIMENSIONS)
        if name != "dp" and size != 1:
            raise BadInput(
                f"the mesh asks for {name} = {size}, but {DIMENSIONS[name]} parallelism does not exist here: only dp "
                "may be larger than 1."
            )
    if sizes["dp"] != world:
        raise BadInput(f"the mesh has dp = {sizes['dp']}, but there are {world} ranks.")
