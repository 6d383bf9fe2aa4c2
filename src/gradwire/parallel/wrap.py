"""Strategies by name, and how a model gets one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives import Reducer
from gradwire.collectives.bytes import raw_all_gather, raw_all_reduce, raw_reduce_scatter
from gradwire.errors import BadInput, unknown
from gradwire.parallel.bucket import BucketManager
from gradwire.parallel.ddp import DDP
from gradwire.parallel.fsdp1 import FSDP1
from gradwire.parallel.fsdp2 import FSDP2
from gradwire.parallel.naive import Naive
from gradwire.parallel.strategy import Strategy, attach, strategy_of

STRATEGIES: dict[str, type[Strategy]] = {
    "naive": Naive,
    "bucket": BucketManager,
    "ddp": DDP,
    "fsdp1": FSDP1,
    "fsdp2": FSDP2,
}
WRAPPERS: dict[type, type[Strategy]] = {DistributedDataParallel: DDP, FSDPModule: FSDP2}


def available() -> list[str]:
    """Every strategy's name, sorted."""
    return sorted(STRATEGIES)


def strategy_class(name: str) -> type[Strategy]:
    """The class behind a strategy's name.

    Raises:
        BadInput: If there is no such strategy.
    """
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    return STRATEGIES[name]


def wrap(
    model: nn.Module,
    strategy: str,
    reducer: Reducer | None = None,
    *,
    device: torch.device | str,
    average: bool = True,
    **options: Any,
) -> nn.Module:
    """Prepare a model for training on the reducer's group of ranks (without a reducer: on all of them).

    Args:
        model: On the CPU or on ``device``, and not wrapped by any framework yet. It may be changed in place. ``fsdp1``
            and ``fsdp2`` need the same weights on every rank; the others give all ranks rank 0's.
        strategy: ``naive``, ``bucket``, ``ddp``, ``fsdp1`` or ``fsdp2``.
        reducer: Averages the gradients; None leaves the framework's own reduction untouched. With one rank there is
            nothing to average and it is never called.
        device: Where the model computes: ``cpu``, or this rank's GPU.
        average: False leaves every rank its own gradients inside of `accumulation`, for an optimizer that communicates
            (`parallel.optimizers`); the reducer is then the optimizer's, and only its group matters here.
        options: The strategy's own, such as ``cap_mb`` of ``bucket`` or ``param_compress`` of ``fsdp2``; its class
            tells them.

    Returns:
        The model to train; the other functions of this room take it.

    Raises:
        BadInput: For an unknown strategy or option, a model that is wrapped or sharded already, a strategy that cannot
            leave gradients alone, or if this version of torch lacks what the reducer needs.
    """
    device = torch.device(device)
    kind = strategy_class(strategy)
    check_plain(model)
    known = set(inspect.signature(kind).parameters) - {"group", "device"}
    for option in options.keys() - known:
        raise unknown(f"option of strategy {strategy}", option, known)
    if not average and kind.kind != "all_reduce":
        raise BadInput(f"strategy {strategy} shards gradients, so no rank could keep its own; take one with replicas.")
    way = kind(reducer.group if reducer else None, device, **options)
    way.averages = average
    numel = trainable(model)  # before the model is cut into shards
    wrapped = way.wrap(model.to(device))
    attach(wrapped, way)
    if reducer is not None and average:
        attach_reducer(reducer, wrapped, way, numel)
    return wrapped


def hook(wrapped: nn.Module, reducer: Reducer) -> None:
    """Put the reducer into a model that DDP or ``fully_shard`` has wrapped already, before its first forward pass.

    The model stays the framework's own: accumulate by its `no_sync` or `set_requires_gradient_sync`, and clip after the
    backward pass as always. Call ``reducer.finish()`` once per optimizer step. With one rank nothing happens.

    Args:
        wrapped: A `DistributedDataParallel` without a communication hook, or the root of an FSDP2 model that is sharded
            over a mesh of one dimension (so not HSDP).
        reducer: Averages the gradients; its group is the one that the model was wrapped with.

    Raises:
        BadInput: For another model or group, or if this version of torch lacks what the reducer needs.
    """
    kind = next((kind for framework, kind in WRAPPERS.items() if isinstance(wrapped, framework)), None)
    if kind is None:
        raise BadInput(
            f"{type(wrapped).__name__} is neither a DistributedDataParallel nor an FSDP2 model (fully_shard); "
            f"let gradwire.wrap wrap it."
        )
    check_ranks(wrapped, reducer)
    device = next(wrapped.parameters()).device
    attach_reducer(reducer, wrapped, kind(reducer.group, device), trainable(wrapped))


def check_plain(model: nn.Module) -> None:
    """Make sure that no framework has wrapped or sharded the model, or a part of it: it would average a second time.

    Raises:
        BadInput: If one has.
    """
    wrappers = DistributedDataParallel, FullyShardedDataParallel, FSDPModule
    found = [module for module in model.modules() if isinstance(module, wrappers)]
    if found or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise BadInput(
            f"the model is wrapped or sharded already ({type((found or [model])[0]).__name__}): give gradwire.wrap the "
            f"model itself, or a reducer to what DDP or fully_shard has made of it with gradwire.hook."
        )


def check_ranks(wrapped: nn.Module, reducer: Reducer) -> None:
    """Make sure that DDP or FSDP2 averages over the reducer's ranks, and all of them at once.

    Raises:
        BadInput: If it does not: under HSDP one more all-reduce follows, which the reducer does not see.
    """
    reduced = set()
    for parameter in wrapped.parameters():
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            if mesh.ndim > 1 or not placements[0].is_shard():
                raise BadInput(
                    f"{type(wrapped).__name__} has parameters placed as {placements} on a mesh of shape "
                    f"{tuple(mesh.shape)}, as HSDP, replication or tensor parallelism does: a reducer goes only into "
                    f"plain DDP, or into fully_shard over a mesh of one dimension."
                )
            reduced.add(tuple(dist.get_process_group_ranks(mesh.get_group())))
    if isinstance(wrapped, DistributedDataParallel):
        reduced.add(tuple(dist.get_process_group_ranks(wrapped.process_group)))
    own = tuple(dist.get_process_group_ranks(reducer.group or dist.group.WORLD))
    for ranks in reduced - {own}:
        raise BadInput(
            f"the model averages its gradients over ranks {list(ranks)} and the reducer over {list(own)}: give Reducer "
            f"the process group that the model was wrapped with."
        )


def attach_reducer(reducer: Reducer, wrapped: nn.Module, way: Strategy, numel: int) -> None:
    """Put the reducer, which now learns the model's trainable elements, in the place of the framework's reduction."""
    if reducer.world > 1:
        reducer.prepare(way.kind, numel)
        way.hook(wrapped, reducer)


def trainable(model: nn.Module) -> int:
    """Elements of the parameters that are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def reduced_numel(wrapped: nn.Module) -> int:
    """Elements that the framework's own reduction is given in one optimizer step, its padding included."""
    return strategy_of(wrapped).reduced_numel(wrapped)


def traffic_unhooked(numel: int, strategy: str, world: int) -> int:
    """Bytes over all ranks that the framework's own float32 reduction sends per optimizer step (closed form).

    Args:
        numel: Trainable elements of the model, or with padding `reduced_numel`.
        strategy: Name of the strategy.
        world: Number of ranks.
    """
    raw = raw_all_reduce if strategy_class(strategy).kind == "all_reduce" else raw_reduce_scatter
    return raw(numel, world)


def parameters_unhooked(
    strategy: str, units: Sequence[int], world: int, micro_batches: int = 1, *, evaluated: bool = False
) -> int | None:
    """Bytes over all ranks that float32 all-gathers of the parameters send in one optimizer step (closed form).

    For each micro-batch FSDP gathers a block in the forward pass and again in the backward pass. What is in no block
    stays gathered in between, and after an evaluation, for the next step.

    Args:
        strategy: Name of the strategy.
        units: Elements, frozen ones too: first what is in no block, then each block, as `unit_sizes` tells.
        world: Number of ranks.
        micro_batches: Forward and backward passes of the step.
        evaluated: Whether a forward pass without a backward pass came between the step before and this one.

    Returns:
        None for replicas, which gather nothing.
    """
    if strategy_class(strategy).kind == "all_reduce":
        return None
    first, *blocks = units
    return raw_all_gather(micro_batches * (first + 2 * sum(blocks)) - evaluated * first, world)
