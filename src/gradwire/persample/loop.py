"""Per-sample gradients by one backward pass per sample: slow, memory-light, and the oracle of faster methods."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from gradwire.data.batches import IGNORED, Batch
from gradwire.persample.batch import PerSample, Reduction, evaluation, sample_losses, trainable


class SampleGradient(NamedTuple):
    """One sample's loss and its gradient by parameter name (a tied parameter has one name, the first).

    A sample without a target has no loss (None) and a zero gradient.
    """

    sample_id: str
    loss: float | None
    n_targets: int
    gradient: dict[str, Tensor]


def gradients(
    model: nn.Module, batch: Batch, reduction: Reduction = "mean", names: Collection[str] | None = None
) -> PerSample:
    """The gradients of a batch's samples, each computed alone: of all trainable parameters, or of ``names``."""
    found = list(each(model, batch, reduction, names))
    names = found[0].gradient if found else {}
    return PerSample(
        {name: torch.stack([sample.gradient[name] for sample in found]) for name in names},
        torch.tensor([sample.loss or 0.0 for sample in found], device=batch.labels.device),
        torch.tensor([sample.n_targets for sample in found], device=batch.labels.device),
    )


def each(
    model: nn.Module, batch: Batch, reduction: Reduction = "mean", names: Collection[str] | None = None
) -> Iterator[SampleGradient]:
    """The gradient of each sample's own loss, the mean or sum of the cross-entropy over the sample's valid targets.

    Every sample goes through the model alone and without its padding, so neither the batch nor its width changes a
    result. Dropout is off while the iterator runs.

    Args:
        model: A causal language model that returns ``logits``; on the batch's device.
        batch: Samples of any length, padded on the right.
        reduction: Mean or sum.
        names: The parameters that are wanted; None: all trainable ones.
    """
    parameters = {name: p for name, p in trainable(model).items() if names is None or name in names}
    with evaluation(model):
        for tokens, labels, sample_id in zip(batch.input_ids, batch.labels, batch.sample_id, strict=True):
            yield _gradient(model, parameters, tokens, labels, sample_id, reduction)


def _gradient(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    tokens: Tensor,
    labels: Tensor,
    sample_id: str,
    reduction: Reduction,
) -> SampleGradient:
    targets = (labels[1:] != IGNORED).nonzero().flatten() + 1
    if not len(targets):
        return SampleGradient(sample_id, None, 0, {name: torch.zeros_like(p) for name, p in parameters.items()})
    end = int(targets[-1]) + 1  # attention is causal: what comes later touches no target
    logits = model(tokens[None, :end], use_cache=False).logits[0]
    loss = cross_entropy(logits[:-1], labels[1:end], ignore_index=IGNORED, reduction=reduction)
    found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    return SampleGradient(sample_id, loss.item(), len(targets), dict(zip(parameters, found, strict=True)))


def of_sharded(model: nn.Module, batch: Batch, reduction: Reduction = "mean") -> Iterator[tuple[str, Tensor]]:
    """A sample's gradient where weights are sharded: each parameter's, ``[1, *shape]``, one whole after the other.

    It is the wrapper's own mean over the ranks, so all of them must have the same sample, and take what is given.

    Args:
        model: Under FSDP2; its own gradients are replaced, and gone afterwards.
        batch: One sample.
        reduction: Mean or sum.
    """
    model.zero_grad()
    with evaluation(model):
        sample_losses(model(batch.input_ids, use_cache=False).logits, batch.labels, reduction).sum().backward()
    for name, parameter in trainable(model).items():
        found, parameter.grad = parameter.grad, None
        if found is None:
            yield name, torch.zeros(1, *parameter.shape, device=parameter.device)
        else:
            yield name, (found.full_tensor() if isinstance(found, DTensor) else found)[None]
