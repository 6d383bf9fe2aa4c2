"""Hybrid sharding: fully_shard (FSDP2) inside islands, and an all-reduce of each shard between them.

The framework's own HSDP, a mesh of islands x ranks, is used without a reducer. It all-reduces before it calls a hook;
with a reducer each island is therefore sharded by itself, and the reducer takes shards from ``set_all_reduce_hook``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache, partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.collectives import IslandReducer, Islands, Layout, Reducer, build_islands
from gradwire.comm.collectives.ops import Group
from gradwire.comm.parallel.strategies.fsdp2 import (
    FSDP2,
    Members,
    check_not_interrupted,
    check_offered,
    divide_factor,
    gradients_read_at_once,
    groups,
    reduce_unused,
    trained_shapes,
)
from gradwire.comm.parallel.strategy import EndOfBackward


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
        else:
            wrapped.register_forward_pre_hook(check_not_interrupted, prepend=True)
        if not self.averages:
            return
        end = EndOfBackward(reducer.synchronize)
        for module, members in groups(wrapped):
            if reducer.inside is None:
                reduce_unused(module)
            module.set_all_reduce_hook(AllReduce(reducer, end, module, members))


class Row:
    """This rank's shard of a group of parameters.

    Args:
        shapes: The group's trainable parameters, in buffer order.
        islands: The islands.

    Attributes:
        numel: The shard's elements.
        parameters: Each parameter's position in the shard, by name.
        layout: The layout of the shard between the islands.
    """

    def __init__(self, shapes: Iterable[tuple[str, tuple[int, ...]]], islands: Islands) -> None:
        inside = Layout.dim0(shapes, islands.ranks)
        pieces = inside.rows[dist.get_rank(islands.inside)]
        self.numel = inside.row_numel
        self.parameters = {piece.name: inside.place_in_row(piece) for piece in pieces}
        parts = [(p.name, (p.numel // math.prod(p.shape[1:]), *p.shape[1:])) for p in pieces]
        self.layout = Layout.dim0(parts, islands.number)


class AllReduce:
    """The reducer's all-reduce of a group's shard, as FSDP2's hook; it is complete at the end of the pass."""

    def __init__(self, reducer: IslandReducer, end: EndOfBackward, module: FSDPModule, members: Members) -> None:
        self.reducer = reducer
        self.end = end
        self.module = module
        self.members = members
        self.row = cache(partial(Row, islands=reducer.islands))

    def __call__(self, shard: Tensor) -> None:
        """Replace a shard of the island's gradients with the mean over the islands.

        Where the model's owner has set the factor that divides sums, it is their sum: the island has divided by it.

        Raises:
            RunFault: If FSDP2 left a parameter without a gradient out; before torch 2.13 it cannot reduce zeros.
        """
        row = self.row(tuple(trained_shapes(self.members).items()))
        if shard.numel() != row.numel:
            raise RunFault(
                f"a shard of gradients has {shard.numel()} elements, but {row.numel} were expected "
                f"({', '.join(row.parameters)}); did a parameter get no gradient?"
            )
        if not row.parameters:
            return
        scale = 1 if divide_factor(self.module) is None else self.reducer.world
        gradients = {name: shard[place] for name, place in row.parameters.items()}

        def deliver(mean: Tensor) -> None:
            row.layout.unpack(mean if scale == 1 else mean * scale, gradients)

        later = self.end.expect()
        handle = self.reducer.begin_all_reduce(row.layout.pack(gradients), row.layout, deliver)
        divided = shard.dtype == torch.float16 or scale != 1  # by FSDP2, after this hook
        if divided or not later or gradients_read_at_once(self.members, shard):
            handle.wait()
