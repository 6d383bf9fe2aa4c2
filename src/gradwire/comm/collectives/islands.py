"""Reducers between groups of ranks: islands, and groups that may be lost and may join.

Islands have fast links inside each and slow ones between them. Rank r is in island ``r // ranks_per_island``. Inside of
an island ranks hold one model in shards; between islands the ranks with the same shard, one of each island, average it.
A quorum chooses the groups that may be lost (`optimizers.quorum`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.meter import Traffic
from gradwire.comm.collectives.queue import ReductionQueue
from gradwire.comm.collectives.reducer import Given, Reducer, takes_options
from gradwire.comm.topology import check_islands
from gradwire.comm.torch_internals import timeout_of

NAMES = ("between", "inside")


# Why: docs/decisions.md, "Islands are sharded one by one".
class Islands:
    """All ranks of the default group, as islands.

    Args:
        mesh: A mesh of islands x ranks per island with the dimensions ``between`` and ``inside``, over all ranks in
            ascending order. `build_islands` makes one.

    Attributes:
        number: Number of islands.
        ranks: Ranks per island.
        inside: The process group of this rank's island.
        between: The process group of the ranks that hold this rank's shard, one of each island.

    Raises:
        BadInput: If the mesh has other dimensions or another order, or there are fewer than two islands.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.mesh_dim_names != NAMES:
            raise BadInput(
                f"a mesh of islands has the dimensions {NAMES}, not {mesh.mesh_dim_names}; use "
                f"gradwire.comm.collectives.build_islands."
            )
        self.mesh = mesh
        self.number, self.ranks = mesh.mesh.shape
        check_islands(dist.get_world_size(), self.number)
        if mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
            raise BadInput(f"a mesh of islands holds all ranks in ascending order, not {mesh.mesh.tolist()}.")
        self.inside, self.between = mesh.get_group("inside"), mesh.get_group("between")


def build_islands(number: int, device_type: str = "cpu") -> Islands:
    """Divide all ranks into islands. Every rank must call it.

    Args:
        number: Number of islands.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        BadInput: As `check_islands`.
    """
    check_islands(dist.get_world_size(), number)
    rows = torch.arange(dist.get_world_size(), dtype=torch.int64, device="cpu").view(number, -1)
    timeout = timeout_of(None)
    inside, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
    between, _ = dist.new_subgroups_by_enumeration(rows.T.tolist(), timeout=timeout)
    groups = [cast(dist.ProcessGroup, group) for group in (between, inside)]
    return Islands(DeviceMesh.from_group(groups, device_type, mesh=rows, mesh_dim_names=NAMES))


# Why: docs/decisions.md, "An `IslandReducer` is a reducer between islands".
class IslandReducer(Reducer):
    """Reduces between islands, and with ``inside`` also inside them; for strategy ``hsdp``.

    `all_reduce` is between the islands. What `finish` agrees on and sums is over all ranks; without ``inside`` the
    framework averages inside an island. `traffic` covers both levels.

    Args:
        compressor: The encoder of the parts of a shard between islands, as for `Reducer`.
        islands: The islands.
        inside: Reduces inside this rank's island (its group is ``islands.inside``); None: the framework does.
        options: The other options of `Reducer`.

    Raises:
        BadInput: As `Reducer`, or if ``inside`` has another group.
    """

    @takes_options
    def __init__(
        self,
        compressor: Given,
        islands: Islands,
        *,
        inside: Reducer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(compressor, islands.between, draws=dist.get_rank(), **options)
        if inside is not None:
            if inside.group is not islands.inside:
                raise BadInput("the reducer inside an island needs the group Islands.inside.")
            self.join("inside", inside)
        self.islands = islands
        self.everyone = None
        self.topology = f"{islands.number} x {islands.ranks}"

    @property
    def inside(self) -> Reducer | None:
        """The reducer inside this rank's island; None if the framework averages there."""
        return self.parts.get("inside")

    @property
    def traffic(self) -> Traffic:
        """Traffic of both levels; ``details["inside"]`` is that inside the island, None if the framework sums there."""
        traffic = super().traffic
        traffic.details.setdefault("inside", None)
        return traffic


# Why: docs/decisions.md, "A round ends with a quorum".
class QuorumReducer(Reducer):
    """Reduces between groups; `finish` agrees inside this rank's group, the default process group.

    Args:
        compressor: As for `Reducer`.
        number: This rank's number among the ranks of all groups, whether or not they are there; it draws with it.
        options: The other options of `Reducer`.

    Raises:
        BadInput: As `Reducer`, or if residuals are stored in fewer bits: they are cut again for other ranks.
    """

    @takes_options
    def __init__(self, compressor: Given, number: int, **options: Any) -> None:
        super().__init__(compressor, draws=number, **options)
        if self.codec.options.residual_dtype != "float32":
            raise BadInput("a manager needs residual_dtype float32: residuals are cut again when groups change.")
        self.topology = "groups of a quorum"
        self.reduce_over(None)

    @property
    def alone(self) -> bool:
        """Never: `finish` checks the norm of a gradient also where there is no other group."""
        return False

    def reduce_over(self, group: dist.ProcessGroup | None) -> None:
        """Reduce over other ranks from now on, and keep the residuals; None: over this rank only."""
        self.group = group
        self.world, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self._queue = ReductionQueue(group)  # a round waits for its mean
        self.algorithm = self.codec.options.algorithm
        self.codec.loosen()

    def agree(self) -> None:
        """Wait for the other groups; a value that was not finite in one of them sets the flag of all."""
        flag = self.codec.flag
        if self.world > 1 and flag is not None:
            ops.all_reduce(flag, "max", self.group, "agreement", self.meter)
