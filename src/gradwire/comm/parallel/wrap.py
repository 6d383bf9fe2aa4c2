"""Wrap a model with a strategy, by name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.base.errors import BadInput, unknown
from gradwire.comm.collectives import IslandReducer, Islands, Reducer
from gradwire.comm.collectives.world import check_initialized
from gradwire.comm.parallel.checks import (
    check_agreement,
    check_gradients,
    check_has_values,
    parameters_of,
    warn_of_statistics,
)
from gradwire.comm.parallel.model import compiled_in_place, trainable_shapes
from gradwire.comm.parallel.strategies.ddp import DDP
from gradwire.comm.parallel.strategies.hsdp import HSDP
from gradwire.comm.parallel.strategy import Strategy, attach, check_reducer, check_unprepared
from gradwire.comm.topology import STRATEGIES


def strategy_class(name: str) -> type[Strategy]:
    """Return the class of a strategy.

    Raises:
        BadInput: If the name is unknown, or its file or entry point has no such class.
    """
    kind: type[Strategy] = STRATEGIES.find(name, Strategy)
    return kind


def wrap(
    model: nn.Module,
    strategy: str,
    reducer: Reducer | None = None,
    *,
    device: torch.device | str | None = None,
    average: bool = True,
    **options: Any,
) -> nn.Module:
    """Prepare a model for training on the reducer's group of ranks, or on all ranks without a reducer.

    Args:
        model: A model on the CPU or on ``device`` that no framework has wrapped. It may be changed in place. ``fsdp1``,
            ``fsdp2`` and ``hsdp`` need the same weights on every rank; the others broadcast rank 0's. What
            `torch.compile` returned is compiled in place instead, so that parameters keep their names.
        strategy: ``naive``, ``bucket``, ``ddp``, ``fsdp1``, ``fsdp2`` or ``hsdp``.
        reducer: Averages the gradients; None keeps the framework's reduction. With one rank it is never called. For
            ``hsdp`` an `IslandReducer`.
        device: The device to compute on: ``cpu``, or this rank's GPU; None is the device of the model's parameters.
        average: False keeps each rank's own gradients, for an optimizer that communicates (`comm.parallel.optimizers`).
            The reducer then belongs to the optimizer; only its group is used here.
        options: Options of the strategy, such as ``bucket_mb`` and ``find_unused_parameters`` of ``ddp``,
            ``param_compress`` and ``mp_policy`` of ``fsdp2`` or ``islands`` of ``hsdp``; see its class.
            With one rank per island ``hsdp`` is ``ddp``, with a warning.

    Returns:
        The model to train; pass it to the other functions of this package.

    Raises:
        BadInput: If the strategy or an option is unknown, the model is already wrapped or sharded, or is on the meta
            device, the strategy does not support ``average=False``, the reducer has averaged another model, gradients
            are sparse or complex, this version of torch does not support the reducer, or ranks differ in the model, the
            strategy, an option or the reducer.
    """
    device = next(model.parameters()).device if device is None else torch.device(device)
    kind = strategy_class(strategy)
    check_initialized("gradwire.comm.parallel.wrap")
    check_plain(model)
    if reducer is not None:
        check_reducer(reducer)
        check_gradients(model)
    model = compiled_in_place(model)
    known = known_options(kind)
    for option in options.keys() - known:
        raise unknown(f"option of strategy {strategy}", option, known)
    if kind is HSDP and (islands := islands_of(reducer, options)) == dist.get_world_size():
        unused = [option for option, value in options.items() if option != "islands" and value not in ("none", None)]
        without = f" without {', '.join(unused)}" if unused else ""
        warnings.warn(
            f"{islands} islands of one rank each have nothing to shard: using strategy ddp{without}", stacklevel=2
        )
        kind, options = DDP, {}
    if not average and not kind.alone:
        raise BadInput(
            f"strategy {strategy} shards gradients, so ranks cannot keep their own; use one with replicas, or hsdp."
        )
    everyone = None if reducer is None else reducer.everyone
    settings = {"strategy": kind.name, "average": average, **options, "islands": islands_of(reducer, options)}
    check_agreement(everyone, reducer, parameters_of(model), **settings)  # before islands are made, or weights sent
    shapes = trainable_shapes(model)  # before the model is cut into shards
    chosen = kind.build(reducer, device, **options)
    chosen.averages = average
    chosen.reduced = average and reducer is not None and reducer.world > 1
    wrapped = chosen.wrap(model.to(device))
    attach(wrapped, chosen)
    if dist.get_world_size(chosen.group) > 1 and not (average and kind is DDP):  # which sends rank 0's statistics
        warn_of_statistics(wrapped)
    if not chosen.communicates:
        chosen.keep_apart(wrapped)
    if reducer is not None and (average or chosen.communicates):
        chosen.install(wrapped, reducer, shapes)
    return wrapped


def known_options(kind: type[Strategy]) -> set[str]:
    """Return the names of a strategy's options, those that it passes on to its base class included."""
    options = inspect.signature(kind).parameters
    passed_on = any(option.kind is option.VAR_KEYWORD for option in options.values())
    inherited = known_options(kind.__mro__[1]) if passed_on else set()
    return {*options, *inherited} - {"group", "device", "options"}


def islands_of(reducer: Reducer | None, options: Mapping[str, Any]) -> int | None:
    """Return the number of islands that the reducer or the options of ``hsdp`` have; None if neither does."""
    given = reducer.islands if isinstance(reducer, IslandReducer) else options.get("islands")
    return given.number if isinstance(given, Islands) else given


def check_plain(model: nn.Module) -> None:
    """Check that nothing has wrapped or sharded the model or a part of it; it would average a second time.

    Raises:
        BadInput: If one has.
    """
    wrappers = DistributedDataParallel, FullyShardedDataParallel, FSDPModule
    wrapped = [module for module in model.modules() if isinstance(module, wrappers)]
    if wrapped or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise BadInput(
            f"the model is wrapped or sharded already ({type((wrapped or [model])[0]).__name__}): pass the unwrapped "
            f"model to gradwire.comm.parallel.wrap, or this one to gradwire.compress_gradients."
        )
    check_unprepared(model)
    check_has_values(model)
