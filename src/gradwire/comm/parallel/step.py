"""Gradient accumulation and clipping for wrapped models."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import ops
from gradwire.comm.parallel.mesh import local
from gradwire.comm.parallel.strategy import strategy_of


def accumulation(model: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Context for the forward **and** backward pass of one micro-batch; gradients are reduced in the last one only.

    Args:
        model: The model returned by `wrap`; with ``average=False`` gradients are never reduced, under ``hsdp`` only
            inside an island.
        last: Whether this is the last micro-batch of the optimizer step.
    """
    strategy = strategy_of(model)
    return strategy.accumulation(model, last and strategy.communicates)


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their total Euclidean norm is at most ``max_norm``.

    Returns:
        The norm over the whole model before clipping, equal on ranks whose models have equal gradients. If it is not
        finite, nothing is scaled.
    """
    strategy = strategy_of(model)
    gradients = local_gradients(model)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    square = torch.stack([torch.zeros((), device=strategy.device), *norms]).double().square().sum()
    if strategy.kind == "reduce_scatter":
        ops.all_reduce(square, "sum", strategy.shards)
    total = square.sqrt().item()
    if max_norm < total < float("inf"):
        for gradient in gradients:
            gradient.mul_(max_norm / total)
    return total


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Return this rank's gradients: full for a replicated model, shards for a sharded one."""
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    return [local(gradient) for gradient in gradients]
