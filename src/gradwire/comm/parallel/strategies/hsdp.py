"""Hybrid sharding: fully_shard (FSDP2) inside islands, and an all-reduce of each shard between them.

The framework's own HSDP, a mesh of islands x ranks, is used without a reducer. It all-reduces before it calls a hook;
with a reducer each island is therefore sharded by itself, and the reducer averages shards between them.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import IslandReducer, Islands, Reducer, build_islands
from gradwire.comm.collectives.ops import Group
from gradwire.comm.parallel.strategies.fsdp2 import FSDP2
from gradwire.comm.torch_internals import ParameterGroup


# Why: docs/decisions.md, "Islands are sharded one by one".
class HSDP(FSDP2):
    """Parameters sharded inside islands; the reducer averages shards between them.

    With ``average=False`` gradients are averaged inside islands only: each rank owns its shard of its island's
    gradients and weights, and an optimizer that communicates averages those between islands.

    Args:
        group: All ranks.
        device: The model's device.
        islands: The islands, or their number; a reducer has them already.
        options: As for `FSDP2`.
    """

    name = "hsdp"
    alone = True

    def __init__(self, group: Group, device: torch.device, *, islands: Islands | int = 0, **options: Any) -> None:
        self.islands = build_islands(islands, device.type) if isinstance(islands, int) else islands
        super().__init__(group, device, **options)

    @classmethod
    def build(
        cls, reducer: Reducer | None, device: torch.device, *, islands: Islands | int = 0, **options: Any
    ) -> Self:
        """Build the strategy; the islands are the reducer's, or given.

        Raises:
            BadInput: If the reducer is not an `IslandReducer`, or has other islands.
        """
        if reducer is None:
            return cls(None, device, islands=islands, **options)
        if not isinstance(reducer, IslandReducer):
            raise BadInput("strategy hsdp needs an IslandReducer: a Reducer averages over one group of ranks.")
        if islands not in (0, reducer.islands, reducer.islands.number):
            raise BadInput(f"the reducer has {reducer.islands.number} islands, but islands is {islands}; omit it.")
        return cls(None, device, islands=reducer.islands, **options)

    @property
    def shards(self) -> Group:
        """The ranks of this rank's island."""
        return self.islands.inside

    @property
    def copies(self) -> Group:
        """The ranks that hold this rank's shard."""
        return self.islands.between

    def mesh(self) -> DeviceMesh:
        """Return this rank's island, or both dimensions if the framework itself averages between islands."""
        framework = self.averages and not self.reduced
        return self.islands.mesh if framework else self.islands.mesh["inside"]

    def replicas_of(self, group: ParameterGroup) -> Group:
        """Return the ranks with the same shards: FSDP2 knows of none, as each island is sharded by itself."""
        return self.copies
