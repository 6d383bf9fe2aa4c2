"""Types and helpers shared by all per-sample gradient methods: per-sample losses, targets, padding."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradwire.data.batches import IGNORED, Batch
from gradwire.errors import bounded

Reduction = Literal["mean", "sum"]


class PerSample(NamedTuple):
    """Per-sample gradients of a batch of B samples.

    Attributes:
        gradient: ``[B, *shape]`` by parameter name; a tied parameter appears once, under its first name.
        loss: ``[B]``; 0 for a sample without a target.
        n_targets: ``[B]`` int64; a sample without a target has a zero gradient.
    """

    gradient: dict[str, Tensor]
    loss: Tensor
    n_targets: Tensor


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, each once, in model order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def sample_losses(logits: Tensor, labels: Tensor, reduction: Reduction, weights: Tensor | None = None) -> Tensor:
    """Compute each sample's loss: the weighted cross-entropy over its valid targets, or 0 if it has none.

    The mean divides by the number of targets and not by the sum of weights, which may be 0 or negative and would cancel
    the weight of a whole sample.

    Args:
        logits: ``[B, T, V]``.
        labels: ``[B, T]``, shifted by one inside; `IGNORED` marks positions without a target.
        reduction: ``mean`` or ``sum`` over the targets.
        weights: ``[B, T]``, of the tokens of ``labels``; None: 1.

    Returns:
        ``[B]``.
    """
    shifted = labels[:, 1:]
    each = cross_entropy(logits[:, :-1].flatten(0, 1), shifted.flatten(), ignore_index=IGNORED, reduction="none")
    each = each.view(shifted.shape)
    totals = (each if weights is None else each * weights[:, 1:]).sum(1)
    return totals if reduction == "sum" else totals / n_targets(labels).clamp(min=1)


def n_targets(labels: Tensor) -> Tensor:
    """Count the valid targets in each row of ``labels`` [B, T]: int64 [B]."""
    return (labels[:, 1:] != IGNORED).sum(1)


def padded_width(batch: Batch) -> Batch:
    """Drop the trailing columns without a label in any row, such as padding."""
    used = (batch.labels != IGNORED).any(0).nonzero()
    width = max(2, int(used[-1]) + 1 if len(used) else 0)
    return batch.of_tensors(lambda values: values[:, :width])


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and restore its mode on exit."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def no_targets(batch: Batch) -> Tensor:
    """Mask of the samples without a valid target: bool [B]."""
    return n_targets(batch.labels) == 0


def zeroed(values: Tensor, rows: Tensor) -> Tensor:
    """Set the rows selected by a mask to exact zeros, even where they are NaN; without any, return ``values``."""
    if rows.device.type == "cpu" and not rows.any():  # on a GPU, asking would wait for the GPU
        return values
    return torch.where(rows.view(-1, *[1] * (values.ndim - 1)), torch.zeros_like(values), values)


@cache
def note(text: str) -> None:
    """Print a message to stderr, once per process."""
    print(f"gradwire: {bounded(text)}", file=sys.stderr)


def out_of_memory(error: BaseException) -> bool:
    """Whether the error is an out-of-memory error of the GPU or CPU allocator."""
    message = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "DefaultCPUAllocator" in message
        or "can't allocate memory" in message
    )
