"""What every way of computing per-sample gradients shares: a sample's own loss, and the gradients of a batch."""

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
    """The gradients of a batch's B samples, each of its own loss.

    Attributes:
        gradient: ``[B, *shape]`` by parameter name; a tied parameter has one name, the first.
        loss: ``[B]``; 0 for a sample without a target.
        n_targets: ``[B]`` int64; a sample without a target has a zero gradient.
    """

    gradient: dict[str, Tensor]
    loss: Tensor
    n_targets: Tensor


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have gradients, by name, each once and in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def sample_losses(logits: Tensor, labels: Tensor, reduction: Reduction) -> Tensor:
    """Each sample's own loss: the ``mean`` or the ``sum`` of the cross-entropy over its valid targets, 0 without one.

    Args:
        logits: ``[B, T, V]``.
        labels: ``[B, T]``, shifted here by one; `IGNORED` where there is none.
        reduction: The definition.

    Returns:
        ``[B]``.
    """
    shifted = labels[:, 1:]
    each = cross_entropy(logits[:, :-1].flatten(0, 1), shifted.flatten(), ignore_index=IGNORED, reduction="none")
    totals = each.view(shifted.shape).sum(1)
    return totals if reduction == "sum" else totals / n_targets(labels).clamp(min=1)


def n_targets(labels: Tensor) -> Tensor:
    """The number of valid targets in each row of ``labels`` [B, T]: int64 [B]."""
    return (labels[:, 1:] != IGNORED).sum(1)


def padded_width(batch: Batch) -> Batch:
    """The batch without the columns that are padding in all rows."""
    used = (batch.labels != IGNORED).any(0).nonzero()
    width = max(2, int(used[-1]) + 1 if len(used) else 0)
    return Batch(batch.input_ids[:, :width], batch.labels[:, :width], batch.sample_id)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Dropout off; the model's mode is restored afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def no_targets(batch: Batch) -> Tensor:
    """Which samples have no valid target: bool [B]."""
    return n_targets(batch.labels) == 0


def zeroed(values: Tensor, rows: Tensor) -> Tensor:
    """``values`` with the chosen rows set to exact zeros, whatever they held."""
    return torch.where(rows.view(-1, *[1] * (values.ndim - 1)), torch.zeros_like(values), values)


@cache
def note(text: str) -> None:
    """Say something on stderr, once."""
    print(f"gradwire: {bounded(text)}", file=sys.stderr)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up, the GPU's or the CPU's."""
    told = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in told or "can't allocate memory" in told
