"""Parameters and optimizer state of a wrapped model: whole for the final model, sharded for checkpoints.

Names are those of the unwrapped model in both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, whole and on the CPU, on rank 0; empty on the other ranks. Every rank calls it."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def checkpoint_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's part of the model and the optimizer, in the form that `torch.distributed.checkpoint` saves.

    To resume, load into it with `torch.distributed.checkpoint.load` and hand it to `load_checkpoint_state`.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def load_checkpoint_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Set the model and the optimizer to a loaded `checkpoint_state`."""
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
