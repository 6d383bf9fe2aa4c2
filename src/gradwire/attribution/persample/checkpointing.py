"""Gradient checkpointing: a block's activations are computed again in the backward pass rather than kept."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from gradwire.base.errors import BadInput


def enable(model: nn.Module) -> None:
    """Checkpoint the blocks of a model of transformers, which itself does so in training only, where dropout is on.

    Raises:
        BadInput: If the model has none.
    """
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise BadInput(
            f"--gradient_checkpointing: {type(model).__name__} has no blocks that can be checkpointed; omit it."
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
