"""Token-weighted loss of a model over a split, independent of batch size and world size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import ops
from gradwire.lm.data.batches import Batch


class Quality(NamedTuple):
    """Mean negative log-likelihood per target in nats, its exponential, and the number of targets."""

    loss: float
    ppl: float
    n_targets: int


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the weighted cross-entropy over the batch's targets in nats, a differentiable scalar.

    Samples are right-padded and attention is causal, so no target sees padding and no attention mask is needed.
    """
    logits = model(batch.input_ids, use_cache=False).logits  # [B, T, vocabulary]
    predicted, labels = logits[:, :-1].flatten(0, 1).float(), batch.labels[:, 1:].flatten()
    if batch.weights is None:
        return F.cross_entropy(predicted, labels, ignore_index=-100, reduction="sum")
    losses = F.cross_entropy(predicted, labels, ignore_index=-100, reduction="none")
    return (losses * batch.weights[:, 1:].flatten()).sum()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Quality:
    """Unweighted loss and perplexity over all ranks' ``batches``; every rank must have the same number of them.

    Raises:
        BadInput: If no sample has a target.
    """
    training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        local = replace(batch.to(device), weights=None)
        totals += torch.stack([loss_sum(model, local).double(), torch.tensor(local.n_targets, device=device).double()])
    model.train(training)
    ops.all_reduce(totals, purpose="control")
    if not totals[1]:
        raise BadInput("no sample of the split has a target, so there is no loss: use other data or a larger length.")
    loss = float(totals[0] / totals[1])
    return Quality(loss, math.exp(loss) if loss < 700 else math.inf, int(totals[1]))
