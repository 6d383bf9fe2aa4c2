"""FullyShardedDataParallel (FSDP1): each block's parameters are one flat vector, cut evenly over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.parallel.model import unwrapped
from gradwire.comm.parallel.strategy import EndOfBackward, Strategy
from gradwire.comm.torch_internals import accumulates_flat, flat_parameter, flat_parts, set_hook_state

Shapes: TypeAlias = tuple[tuple[str | None, tuple[int, ...]], ...]


class HookState(NamedTuple):
    """The hook's state for one block.

    Attributes:
        reducer: Averages the gradients.
        end: Waits for the reducer at the end of the backward pass.
        prefix: The beginning of the names of the block's parameters.
        module: The block.
        layout: Makes the layout of the block's flat parameter, of which parameters may be frozen and unfrozen.
    """

    reducer: Reducer
    end: EndOfBackward
    prefix: str
    module: FullyShardedDataParallel
    layout: Callable[[Shapes], Layout]


class FSDP1(Strategy):
    """Sharded parameters; the reducer is FSDP1's communication hook, with one layout per block."""

    name = "fsdp1"
    kind = "reduce_scatter"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap each block, then the rest of the model; a single rank does not shard."""
        wrapped = {id(block) for block in self.units(model)}
        single = dist.get_world_size(self.group) == 1
        return FullyShardedDataParallel(
            model,
            device_mesh=self.mesh(),  # with a mesh instead of a group, checkpoints hold DTensors
            sharding_strategy=ShardingStrategy.NO_SHARD if single else ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in wrapped),
            device_id=self.device,
            use_orig_params=True,
        )

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Register the hook, and set the state of each block."""
        assert isinstance(wrapped, FullyShardedDataParallel)
        wrapped.register_comm_hook(None, reduce_block)
        end = EndOfBackward(reducer.synchronize)
        for prefix, module in sharded(wrapped):
            flat_shapes(prefix, module)  # refuses now what it cannot read
            layout = cache(partial(Layout.cut, world=reducer.world))
            set_hook_state(module, HookState(reducer, end, prefix, module, layout))

    def reduced_numel(self, wrapped: nn.Module) -> int:
        """Count flat parameters with padding: of their parts, for alignment, and of the whole, to a multiple of W."""
        world = dist.get_world_size(self.group)
        if world == 1:
            return super().reduced_numel(wrapped)
        return sum(Layout.cut(flat_shapes(*block), world).numel for block in sharded(wrapped))

    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Use `no_sync` except for the last micro-batch; gradients are unsharded until then."""
        assert isinstance(wrapped, FullyShardedDataParallel)
        return nullcontext() if last else wrapped.no_sync()


def reduce_block(state: HookState, gradient: Tensor, shard: Tensor) -> None:
    """Write this rank's part of the block's mean gradient into ``shard``; FSDP1's hook.

    It is filled until the end of the backward pass, unless FSDP1 reads it at once.
    """
    later = state.end.expect()
    layout = state.layout(flat_shapes(state.prefix, state.module))
    handle = state.reducer.begin_reduce_scatter(gradient, layout, shard.copy_)
    if not later or read_at_once(state, shard):
        handle.wait()


def read_at_once(state: HookState, shard: Tensor) -> bool:
    """Whether FSDP1 adds the shard to a gradient, or converts or moves it."""
    flat = flat_parameter(state.module)
    return (
        accumulates_flat(state.module)
        or state.module.cpu_offload.offload_params
        or (flat.dtype, flat.device) != (shard.dtype, shard.device)
    )


def sharded(wrapped: nn.Module) -> Iterator[tuple[str, FullyShardedDataParallel]]:
    """Yield every block that has a flat parameter, after what its parameters' names begin with."""
    for name, module in wrapped.named_modules():
        if isinstance(module, FullyShardedDataParallel) and flat_parameter(module) is not None:
            yield f"{name}.".removeprefix("."), module


def flat_shapes(prefix: str, module: FullyShardedDataParallel) -> Shapes:
    """Return the names and shapes in a block's flat parameter; alignment and frozen parameters have the name None.

    Raises:
        BadInput: If this version of torch stores flat parameters differently.
    """
    return tuple(
        (None if parameter is None or not parameter.requires_grad else unwrapped(prefix + name), shape)
        for name, shape, parameter in flat_parts(module)
    )
