"""Parameters and optimizer state of a wrapped model: whole for the final model, sharded for checkpoints.

Names are those of the unwrapped model in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gradwire.errors import BadInput
from gradwire.parallel.fsdp1 import WRAPPED
from gradwire.parallel.strategy import strategy_of


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that an optimizer takes, by the names of the unwrapped model."""
    for name, parameter in model.named_parameters():
        yield unwrapped(name), parameter


def unwrapped(name: str) -> str:
    """A parameter's or buffer's name without what the frameworks put into it."""
    return name.replace(WRAPPED, "").removeprefix("module.")


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, whole and on the CPU, on rank 0; empty on the other ranks. Every rank calls it."""
    strategy = strategy_of(model)
    # FSDP1 "offloads" what already lies on the CPU by freeing it under its own feet, so ask only where it moves.
    options = StateDictOptions(full_state_dict=True, cpu_offload=strategy.device.type != "cpu")
    state = get_model_state_dict(model, options=options)
    return state if dist.get_rank(strategy.group) == 0 else {}


def replicated(model: nn.Module) -> bool:
    """Whether every rank holds the whole model and optimizer, not a part of them."""
    return strategy_of(model).kind == "all_reduce"


def checkpoint_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's part of the model and the optimizer, in the form that `torch.distributed.checkpoint` saves.

    `own_part` of it can be saved without that library. To resume, fill it (`filled`) and hand it to
    `load_checkpoint_state`.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def load_checkpoint_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Set the model and the optimizer to a loaded `checkpoint_state`."""
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def own_part(state: Any) -> Any:
    """A nested `checkpoint_state` with plain tensors: of each sharded one what lies on this rank."""
    if isinstance(state, dict):
        return {key: own_part(value) for key, value in state.items()}
    return _local(state) if isinstance(state, Tensor | ShardedTensor) else state


def filled(state: Any, saved: Any) -> Any:
    """A nested `checkpoint_state` whose tensors take the values of a saved `own_part`, in place.

    Raises:
        BadInput: If the two have other names or shapes.
    """
    if isinstance(state, dict):
        if not isinstance(saved, dict) or state.keys() != saved.keys():
            raise BadInput("the checkpoint has other names than this model and its optimizer.")
        return {key: filled(value, saved[key]) for key, value in state.items()}
    if not isinstance(state, Tensor | ShardedTensor):
        return saved
    local = _local(state)
    if local.shape != saved.shape:
        raise BadInput(f"the checkpoint holds {list(saved.shape)} where this model has {list(local.shape)}.")
    with torch.no_grad():
        local.copy_(saved)
    return state


def _local(tensor: Tensor | ShardedTensor) -> Tensor:
    """What of a tensor lies on this rank."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return shards[0].tensor if shards else torch.empty(0)
    return tensor.detach()


def full_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name, as `full_state_dict` gives the model's. Every rank calls it."""
    strategy = strategy_of(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=strategy.device.type != "cpu")
    state = get_optimizer_state_dict(model, optimizer, options=options)
    return state if dist.get_rank(strategy.group) == 0 else {}
