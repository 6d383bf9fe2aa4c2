"""Rows of a factored projection and exact norms in one backward pass that forms no gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.data.batches import Batch
from gradwire.gradients.projections.factored import Factored, Image
from gradwire.persample import hooks
from gradwire.persample.batch import Reduction, no_targets, padded_width, zeroed
from gradwire.persample.uses import Use, square_norm


class Fused(NamedTuple):
    """Of B samples: rows [B, dim] by dim, losses [B], and squared norms of the whole gradients, float64 [B]."""

    rows: Mapping[int, Tensor]
    loss: Tensor
    square_norm: Tensor


def fused_rows(
    model: nn.Module, batch: Batch, projector: Factored, dims: Sequence[int], reduction: Reduction = "mean"
) -> Fused:
    """Project each layer's factors as the backward pass meets them.

    A tied parameter's uses wait for each other, since the norm of their sum is wanted.
    """
    batch = padded_width(batch)
    samples, device = len(batch.labels), batch.labels.device
    image = Image(projector, samples, dims, device)
    squares = torch.zeros(samples, dtype=torch.float64, device=device)
    expected, met = hooks.uses(model), defaultdict[str, list[Use]](list)

    def take(name: str, use: Use) -> None:
        image.add(name, use)
        met[name].append(use)
        if len(met[name]) == expected[name]:
            squares.add_(square_norm(met.pop(name)))

    losses = hooks.backward(model, batch, take, reduction)
    for uses in met.values():  # of layers that this pass went through less often than the model has them
        squares.add_(square_norm(uses))
    empty = no_targets(batch)
    rows = {dim: zeroed(found, empty) for dim, found in image.finished().items()}
    return Fused(rows, losses, zeroed(squares, empty))
