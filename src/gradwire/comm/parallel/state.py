"""Parameters and optimizer state of a wrapped model: full for the final model, sharded for checkpoints.

Both use the names of the unwrapped model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from gradwire.base.errors import BadInput
from gradwire.comm.parallel.model import first_row, local
from gradwire.comm.parallel.strategy import strategy_of


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, full and on the CPU, on rank 0, and {} elsewhere. Every rank must call it."""
    strategy = strategy_of(model)
    state = _full(get_model_state_dict(model, options=_options(model)))
    return state if dist.get_rank(strategy.group) == 0 else {}


def replica_bytes(model: nn.Module) -> int | None:
    """Return the memory of this rank's replicas of sharded parameters; None without any."""
    replicas = strategy_of(model).replicas.values()
    return sum(replica.values.nbytes for replica in replicas) if replicas else None


def replicated(model: nn.Module) -> bool:
    """Whether every rank holds the full model and optimizer."""
    return strategy_of(model).kind == "all_reduce"


def checkpoint_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return this rank's part of the model and the optimizer, for `torch.distributed.checkpoint`.

    `own_part` of it can be saved without that library. To resume, `filled` puts the saved values into it, and
    `load_checkpoint_state` loads it.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    strategy = strategy_of(model)
    if strategy.replicas:  # every rank has all of a replica, and stores its own row
        mesh = strategy.mesh()
        rows = {name: replica.row.clone() for name, replica in strategy.replicas.items()}
        placed = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        state["replicas"] = {name: DTensor.from_local(row, mesh, placed) for name, row in rows.items()}
    return state


def load_checkpoint_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Set the model and the optimizer to a loaded `checkpoint_state`; replicas that it lacks have the exact weights."""
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, replica in strategy_of(model).replicas.items():
        if "replicas" in state:
            replica.restore(local(state["replicas"][name]))
        else:
            replica.reset({name: local(parameter) for name, parameter in model.named_parameters()})


def own_part(state: Any) -> Any:
    """Return a nested `checkpoint_state` with plain tensors: of a sharded one, this rank's shard."""
    if isinstance(state, dict):
        return {key: own_part(value) for key, value in state.items()}
    return local(state) if isinstance(state, Tensor) else state


def filled(state: Any, saved: Any) -> Any:
    """Copy the values of a saved `own_part` into a nested `checkpoint_state`, in place, and return it.

    Raises:
        BadInput: If names or shapes differ.
    """
    if isinstance(state, dict):
        if not isinstance(saved, dict) or state.keys() != saved.keys():
            raise BadInput("the checkpoint has other names than this model and its optimizer.")
        return {key: filled(value, saved[key]) for key, value in state.items()}
    if not isinstance(state, Tensor):
        return saved
    shard = local(state)
    if shard.shape != saved.shape:
        raise BadInput(f"the checkpoint holds {list(saved.shape)} where this model has {list(shard.shape)}.")
    with torch.no_grad():
        shard.copy_(saved)
    return state


def joined(state: Any, parts: Sequence[Any]) -> Any:
    """Copy this rank's part of the values that ranks of another topology saved into a nested `checkpoint_state`.

    Args:
        state: The state without replicas; changed in place.
        parts: The `own_part` of each rank that shared a model, in the order of their shards.

    Returns:
        The state.

    Raises:
        BadInput: If names or shapes differ.
    """
    if isinstance(state, dict):
        if any(state.keys() != part.keys() for part in parts):
            raise BadInput("the checkpoint has other names than this model and its optimizer.")
        return {key: joined(value, [part[key] for part in parts]) for key, value in state.items()}
    if not isinstance(state, Tensor):
        return parts[0]
    whole = parts[0] if parts[0].shape == state.size() else torch.cat(list(parts))
    if whole.shape != state.size():
        raise BadInput(f"the checkpoint holds {list(whole.shape)} where this model has {list(state.size())}.")
    shard = local(state)
    if shard.numel():
        with torch.no_grad():
            shard.copy_(whole[first_row(state) :][: len(shard)] if shard.ndim else whole)
    return state


def full_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, as `full_state_dict` does. Every rank must call it."""
    strategy = strategy_of(model)
    state = _full(get_optimizer_state_dict(model, optimizer, options=_options(model)))
    return state if dist.get_rank(strategy.group) == 0 else {}


def _options(model: nn.Module) -> StateDictOptions:
    """Return options for a full state on the CPU; `_full` gathers what they leave sharded."""
    strategy = strategy_of(model)
    offload = strategy.device.type != "cpu"  # FSDP1 frees tensors that are already on the CPU
    # torch 2.11 crashes when it gathers a DTensor on a GPU through gloo; on the CPU it gathers correctly.
    crashes = offload and isinstance(model, FSDPModule) and dist.get_backend(strategy.group) == "gloo"
    return StateDictOptions(full_state_dict=not crashes, cpu_offload=offload)


def _full(state: Any) -> Any:
    """Return a nested state with the full tensor of each DTensor."""
    if isinstance(state, dict):
        return {key: _full(value) for key, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state
