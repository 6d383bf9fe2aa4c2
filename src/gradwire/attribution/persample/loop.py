"""Per-sample gradients by one backward pass per sample: slow, low memory, the reference for the faster methods."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradwire.attribution.persample.batch import (
    PerSample,
    Reduction,
    allocated,
    evaluation,
    losses_of,
    trainable,
    widened,
)
from gradwire.lm.data.batches import IGNORED, Batch


class SampleGradient(NamedTuple):
    """One sample's loss and its gradient by parameter name; a tied parameter appears under its first name.

    A sample without a target has loss None and a zero gradient.
    """

    sample_id: str
    loss: float | None
    n_targets: int
    gradient: dict[str, Tensor]


def gradients(
    model: nn.Module,
    batch: Batch,
    reduction: Reduction = "mean",
    names: Collection[str] | None = None,
    out: dict[str, Tensor] | None = None,
) -> PerSample:
    """Compute the per-sample gradients of a batch one sample at a time, for all trainable parameters or ``names``.

    ``out`` is where they are written, as `PerSample.gradient`; None: new tensors.
    """
    out = allocated(model, len(batch.labels), names) if out is None else out
    losses, counts = [], []
    for row, sample in enumerate(each(model, batch, reduction, names)):
        for name, gradient in sample.gradient.items():
            out[name][row] = gradient
        losses.append(sample.loss or 0.0)
        counts.append(sample.n_targets)
    device = batch.labels.device
    return PerSample(out, torch.tensor(losses, device=device), torch.tensor(counts, device=device))


def each(
    model: nn.Module, batch: Batch, reduction: Reduction = "mean", names: Collection[str] | None = None
) -> Iterator[SampleGradient]:
    """Yield the gradient of each sample's loss, the mean or sum of the weighted cross-entropy over its valid targets.

    Each sample runs through the model alone and without padding, so the result does not depend on the batch. Dropout
    is off while the iterator runs.

    Args:
        model: A causal language model that returns ``logits``; on the batch's device.
        batch: Samples of any length, padded on the right.
        reduction: Mean or sum.
        names: Parameters to differentiate; None for all trainable ones.
    """
    parameters = {name: p for name, p in trainable(model).items() if names is None or name in names}
    with evaluation(model):
        for sample in batch.split(1):
            yield _gradient(model, parameters, sample, reduction)


def _gradient(
    model: nn.Module, parameters: dict[str, nn.Parameter], sample: Batch, reduction: Reduction
) -> SampleGradient:
    targets = (sample.labels[0, 1:] != IGNORED).nonzero().flatten() + 1
    (sample_id,) = sample.sample_id
    if not len(targets):
        return SampleGradient(sample_id, None, 0, {name: torch.zeros_like(p) for name, p in parameters.items()})
    end = int(targets[-1]) + 1  # attention is causal: later tokens do not affect any target
    used = sample.of_tensors(lambda values: values[:, :end])
    loss = losses_of(model, used, reduction).squeeze(0)
    gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    return SampleGradient(sample_id, loss.item(), len(targets), dict(zip(parameters, gradients, strict=True)))


def of_sharded(model: nn.Module, batch: Batch, reduction: Reduction = "mean") -> Iterator[tuple[str, Tensor]]:
    """Yield one sample's gradient under FSDP2, one full parameter ``[1, *shape]`` at a time.

    FSDP2 averages gradients over the ranks, so all ranks must pass the same sample and exhaust the iterator.

    Args:
        model: Wrapped by FSDP2; its ``.grad`` fields are overwritten and then cleared.
        batch: One sample.
        reduction: Mean or sum.
    """
    model.zero_grad()
    with evaluation(model):
        losses_of(model, batch, reduction).sum().backward()
    for name, parameter in trainable(model).items():
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            yield name, torch.zeros(1, *parameter.shape, device=parameter.device)
        else:
            yield name, widened(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)[None]
