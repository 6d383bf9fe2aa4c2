"""FullyShardedDataParallel (FSDP1): each block's parameters are one flat vector, cut evenly over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from gradwire.collectives import Layout, Reducer
from gradwire.errors import BadInput
from gradwire.parallel.backward import EndOfBackward
from gradwire.parallel.names import unwrapped
from gradwire.parallel.strategy import Strategy, blocks


class HookState(NamedTuple):
    """The hook's state for one block.

    Attributes:
        reducer: Averages the gradients.
        layout: The layout of the block's flat parameter.
        end: Waits for the reducer at the end of the backward pass.
        module: The block.
    """

    reducer: Reducer
    layout: Layout
    end: EndOfBackward
    module: FullyShardedDataParallel


class FSDP1(Strategy):
    """Sharded parameters; the reducer is FSDP1's communication hook, with one layout per block."""

    name = "fsdp1"
    kind = "reduce_scatter"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap each block, then the rest of the model; a single rank does not shard."""
        wrapped = {id(block) for block in blocks(model)}
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
        for module, layout in layouts(wrapped, reducer.world):
            module._comm_hook_state = HookState(reducer, layout, end, module)

    def reduced_numel(self, wrapped: nn.Module) -> int:
        """Count flat parameters with padding: of their parts, for alignment, and of the whole, to a multiple of W."""
        world = dist.get_world_size(self.group)
        return super().reduced_numel(wrapped) if world == 1 else sum(of.numel for _, of in layouts(wrapped, world))

    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Use `no_sync` except for the last micro-batch; gradients are unsharded until then."""
        assert isinstance(wrapped, FullyShardedDataParallel)
        return nullcontext() if last else wrapped.no_sync()


def reduce_block(state: HookState, gradient: Tensor, shard: Tensor) -> None:
    """Write this rank's part of the block's mean gradient into ``shard``; FSDP1's hook.

    It is filled until the end of the backward pass, unless FSDP1 reads it at once.
    """
    later = state.end.expect()
    handle = state.reducer.begin_reduce_scatter(gradient, state.layout, shard.copy_)
    if not later or read_at_once(state, shard):
        handle.wait()


def read_at_once(state: HookState, shard: Tensor) -> bool:
    """Whether FSDP1 adds the shard to a gradient, or converts or moves it."""
    flat = state.module._handle.flat_param
    return (
        hasattr(flat, "_saved_grad_shard")
        or state.module.cpu_offload.offload_params
        or (flat.dtype, flat.device) != (shard.dtype, shard.device)
    )


def layouts(wrapped: nn.Module, world: int) -> Iterator[tuple[FullyShardedDataParallel, Layout]]:
    """Yield every block with the layout of its flat parameter."""
    for name, module in wrapped.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield module, Layout.cut(flat_shapes(f"{name}.".removeprefix("."), module), world)


def flat_shapes(prefix: str, module: FullyShardedDataParallel) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """Yield the names and shapes in a block's flat parameter; alignment and frozen parameters have the name None.

    Raises:
        BadInput: If this version of torch stores flat parameters differently.
    """
    flat = module._handle.flat_param
    try:
        parameters = zip(flat._fqns, flat._shapes, flat._params, strict=True)
        numels = list(zip(flat._numels_with_padding, flat._is_padding_mask, strict=True))
    except AttributeError as error:
        raise BadInput(f"strategy fsdp1 with a compressor does not support this version of torch ({error}).") from error
    for numel, padding in numels:
        if padding:
            yield None, (numel,)
            continue
        name, shape, parameter = next(parameters)
        yield unwrapped(prefix + name) if parameter.requires_grad else None, tuple(shape)
