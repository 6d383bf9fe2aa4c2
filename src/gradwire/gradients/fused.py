"""Rows of a factored projection and exact norms in one backward pass, without forming gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from gradwire.data.batches import Batch
from gradwire.gradients.projections.factored import Factored, Image
from gradwire.persample import hooks
from gradwire.persample.batch import Reduction, no_targets, padded_width, zeroed
from gradwire.persample.layer_factors import LayerFactor
from gradwire.persample.square_norms import SquareNorms


class Fused(NamedTuple):
    """Results for B samples: rows [B, dim] by dim, losses [B], and squared gradient norms, float64 [B]."""

    rows: Mapping[int, Tensor]
    loss: Tensor
    square_norm: Tensor


def fused_rows(
    model: nn.Module, batch: Batch, projector: Factored, dims: Sequence[int], reduction: Reduction = "mean"
) -> Fused:
    """Project each layer's factors during the backward pass.

    Raises:
        Unseen: If the hooks miss a use of a parameter.
    """
    batch = padded_width(batch)
    samples, device = len(batch.labels), batch.labels.device
    image = Image(projector, samples, dims, device)
    squares = SquareNorms(samples, device)

    def take(name: str, use: LayerFactor, last: bool) -> None:
        image.add(name, use)
        squares.take(name, use, last)

    losses = hooks.all_seen(hooks.backward(model, batch, take, reduction))
    empty = no_targets(batch)
    rows = {dim: zeroed(found, empty) for dim, found in image.finished().items()}
    return Fused(rows, losses, zeroed(squares.total(), empty))
