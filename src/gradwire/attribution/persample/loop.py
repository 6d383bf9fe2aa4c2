"""Per-sample gradients by one backward pass per sample: slow, low memory, the reference for the faster methods."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradwire.attribution.persample.batch import (
    PerSample,
    Reduction,
    allocated,
    evaluation,
    losses_of,
    n_targets,
    trainable,
    widened,
)
from gradwire.lm.data.batches import IGNORED, Batch


def gradients(
    model: nn.Module,
    batch: Batch,
    reduction: Reduction = "mean",
    names: Collection[str] | None = None,
    out: dict[str, Tensor] | None = None,
) -> PerSample:
    """Compute the gradient of each sample's loss, the mean or sum of the cross-entropy over its targets.

    Each sample runs through the model alone and without padding, so the result does not depend on the batch. A tied
    parameter appears under its first name.

    Args:
        model: A causal language model that returns ``logits``; on the batch's device.
        batch: Samples of any length, padded on the right.
        reduction: Mean or sum.
        names: Parameters to differentiate; None for all trainable ones.
        out: Where the gradients are written, as `PerSample.gradient`; None: new tensors.
    """
    out = allocated(model, len(batch.labels), names) if out is None else out
    parameters = {name: p for name, p in trainable(model).items() if names is None or name in names}
    losses = []
    with evaluation(model):
        for row, sample in enumerate(batch.split(1)):
            targets = (sample.labels[0, 1:] != IGNORED).nonzero().flatten() + 1
            if not len(targets):
                losses.append(torch.zeros(1, device=batch.labels.device))
                for gradient in out.values():
                    gradient[row] = 0
                continue
            loss = losses_of(model, _until(sample, int(targets[-1]) + 1), reduction)
            losses.append(loss.detach())
            of_sample = torch.autograd.grad(loss.sum(), list(parameters.values()), materialize_grads=True)
            for name, gradient in zip(parameters, of_sample, strict=True):
                out[name][row] = gradient
    return PerSample(out, torch.cat(losses), n_targets(batch.labels))


def _until(sample: Batch, end: int) -> Batch:
    """The first ``end`` tokens; attention is causal, so later tokens do not affect any target before them."""
    return sample.of_tensors(lambda values: values[:, :end])


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
