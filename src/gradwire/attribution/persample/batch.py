"""Types and helpers shared by all per-sample gradient methods: per-sample losses, targets, padding."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from gradwire.base.errors import bounded
from gradwire.lm.data.batches import IGNORED, Batch

Reduction = Literal["mean", "sum"]
PART = {"cpu": 1 << 16, "cuda": 1 << 24}  # entries that `squares` converts to float64 at once


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


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trainable parameters, by name."""
    return {name: tuple(parameter.shape) for name, parameter in trainable(model).items()}


def restrict(model: nn.Module, names: Collection[str]) -> None:
    """Freeze the parameters whose names are not among ``names``."""
    for name, parameter in trainable(model).items():
        parameter.requires_grad_(name in names)


def allocated(model: nn.Module, samples: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return uninitialised gradients ``[samples, *shape]`` of ``names``, or of all trainable parameters."""
    wanted = {name: p for name, p in trainable(model).items() if names is None or name in names}
    return {name: widened(p.new_empty(samples, *p.shape)) for name, p in wanted.items()}


def widened(values: Tensor) -> Tensor:
    """Return values of a narrower floating-point type than float32 in float32, others as they are."""
    return values.float() if values.is_floating_point() and values.itemsize < 4 else values


def losses_of(model: nn.Module, batch: Batch, reduction: Reduction = "mean") -> Tensor:
    """Compute each sample's loss under a causal language model that returns ``logits``: [B], differentiable."""
    logits = widened(model(read(batch.input_ids), use_cache=False).logits)
    return sample_losses(logits, batch.labels, reduction)


def read(input_ids: Tensor) -> Tensor:
    """Return the tokens that a model reads, [B, T - 1]: all but the last, which is only a target."""
    return input_ids[:, : max(1, input_ids.shape[1] - 1)]


def sample_losses(logits: Tensor, labels: Tensor, reduction: Reduction) -> Tensor:
    """Compute each sample's loss: the cross-entropy over its valid targets, or 0 if it has none.

    Args:
        logits: ``[B, T, V]``, of which the last are not used, or ``[B, T - 1, V]``.
        labels: ``[B, T]``, shifted by one inside; `IGNORED` marks positions without a target.
        reduction: ``mean`` or ``sum`` over the targets.

    Returns:
        ``[B]``.
    """
    after = labels.shape[1] - 1
    shifted = pad(labels[:, 1:], (0, logits.shape[1] - after), value=IGNORED)  # a slice of the logits would copy them
    losses = cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=IGNORED, reduction="none")
    totals = losses.view(shifted.shape)[:, :after].sum(1)
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
    """Put the model in evaluation mode, and restore the mode of each module on exit."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def no_targets(batch: Batch) -> Tensor:
    """Mask of the samples without a valid target: bool [B]."""
    return n_targets(batch.labels) == 0


def zeroed(values: Tensor, rows: Tensor) -> Tensor:
    """Set the rows selected by a mask to exact zeros, in place, even where they are NaN."""
    if rows.device.type == "cpu" and not rows.any():  # on a GPU, asking would wait for the GPU
        return values
    return values.masked_fill_(rows.view(-1, *[1] * (values.ndim - 1)), 0.0)


def squares(values: Tensor) -> Tensor:
    """Compute the squared norm of each row of ``values`` [B, n] in float64: [B].

    Parts that stay in the cache are converted one by one, several times as fast as all of ``values`` at once.
    """
    total = values.new_zeros(len(values), dtype=torch.float64)
    for columns in values.split(max(1, PART[values.device.type] // max(1, len(values))), dim=1):
        exact = columns.double()
        total += torch.linalg.vecdot(exact, exact)
    return total


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
