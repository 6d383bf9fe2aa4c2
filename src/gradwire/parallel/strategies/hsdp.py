"""Hybrid sharding: fully_shard (FSDP2) inside islands, and an all-reduce of each shard between them.

The framework's own HSDP, a mesh of islands x ranks, is used without a reducer. It all-reduces before it calls a hook;
with a reducer each island is therefore sharded by itself, and the reducer takes shards from ``set_all_reduce_hook``.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from gradwire.collectives import IslandReducer, Islands, Layout, Reducer, build_islands
from gradwire.collectives.ops import Group
from gradwire.errors import BadInput, RunFault
from gradwire.parallel.backward import EndOfBackward
from gradwire.parallel.strategies.fsdp2 import FSDP2, check_offered, gradients_read_at_once, groups, reduce_unused


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

    @property
    def communicates(self) -> bool:
        """Always: gradients are reduced inside islands."""
        return True

    def mesh(self) -> DeviceMesh:
        """Return this rank's island, or both dimensions if the framework itself averages between islands."""
        framework = self.averages and not self.reduced
        return self.islands.mesh if framework else self.islands.mesh["inside"]

    def prepare(self, reducer: Reducer, numel: int) -> None:
        """Prepare both levels."""
        assert isinstance(reducer, IslandReducer)
        reducer.prepare("all_reduce", numel // self.islands.ranks)
        if reducer.inside is not None:
            reducer.inside.prepare("reduce_scatter", numel)

    def changed(self, wrapped: nn.Module) -> None:
        """Drop gathered weights: the root keeps them from an evaluation to the next step."""
        assert isinstance(wrapped, FSDPModule)
        wrapped.reshard()

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Reduce each shard between islands, and with ``inside`` each group of parameters inside them."""
        assert isinstance(reducer, IslandReducer)
        check_offered("islands", "set_all_reduce_hook")
        if reducer.inside is not None:
            super().hook(wrapped, reducer.inside)
        if not self.averages:
            return
        end = EndOfBackward(reducer.synchronize)
        for module, parameters in groups(wrapped):
            if reducer.inside is None:
                reduce_unused(module)
            trained = {name: p for name, p in parameters.items() if p.requires_grad}
            row = own_row(trained, self.islands)
            if row.parameters:
                module.set_all_reduce_hook(AllReduce(reducer, row, end, [*parameters.values()]))


class Row:
    """This rank's shard of a group of parameters.

    Args:
        layout: The group's layout inside the island.
        rank: This rank's place in the island.

    Attributes:
        numel: The shard's elements.
        parameters: Each parameter's position in the shard, by name.
        shapes: The shape of each parameter's part, by name.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self.numel = layout.row_numel
        self.parameters = {piece.name: layout.place_in_row(piece) for piece in layout.rows[rank]}
        self.shapes = {
            piece.name: (piece.numel // math.prod(piece.shape[1:]), *piece.shape[1:]) for piece in layout.rows[rank]
        }


def own_row(parameters: dict[str, nn.Parameter], islands: Islands) -> Row:
    """Return this rank's shard of parameters that are sharded inside an island."""
    layout = Layout.dim0([(name, tuple(p.shape)) for name, p in parameters.items()], islands.ranks)
    return Row(layout, dist.get_rank(islands.inside))


class AllReduce:
    """The reducer's all-reduce of a group's shard, as FSDP2's hook; it is complete at the end of the pass."""

    def __init__(self, reducer: Reducer, row: Row, end: EndOfBackward, parameters: list[nn.Parameter]) -> None:
        self.reducer = reducer
        self.row = row
        self.end = end
        self.parameters = parameters
        self.layout = Layout.dim0(row.shapes.items(), reducer.world)

    def __call__(self, shard: Tensor) -> None:
        """Replace a shard of the island's mean gradients with the mean over the islands.

        Raises:
            RunFault: If FSDP2 left a parameter without a gradient out; before torch 2.13 it cannot reduce zeros.
        """
        if shard.numel() != self.row.numel:
            raise RunFault(
                f"a shard of gradients has {shard.numel()} elements, but {self.row.numel} were expected "
                f"({', '.join(self.row.parameters)}); did a parameter get no gradient?"
            )
        self.end.expect()
        gradients = {name: shard[place] for name, place in self.row.parameters.items()}
        handle = self.reducer.begin_all_reduce(
            self.layout.pack(gradients), self.layout, lambda mean: self.layout.unpack(mean, gradients)
        )
        divided = shard.dtype == torch.float16  # by FSDP2, after this hook
        if divided or gradients_read_at_once(self.parameters, shard):
            handle.wait()
