"""Projected rows and exact norms in one backward pass that holds the gradient of one parameter at a time, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.attribution.persample import hooks, loop
from gradwire.attribution.persample.batch import Reduction, no_targets, padded_width, zeroed
from gradwire.attribution.persample.layer_factors import Direct, LayerFactor, SquareNorms
from gradwire.attribution.projections import Projector
from gradwire.lm.data.batches import Batch


class Fused(NamedTuple):
    """Results for B samples and P parts of the parameters.

    Attributes:
        rows: [B, P, dim] by dim.
        loss: [B].
        square_norm: Squared gradient norms, float64 [B, P].
    """

    rows: Mapping[int, Tensor]
    loss: Tensor
    square_norm: Tensor


class Images:
    """Projected rows of each part of the parameters, accumulated parameter by parameter.

    Args:
        parts: The projections of the parts.
        samples: Number of samples.
        dims: Widths of the rows.
        device: Device of the rows.
    """

    def __init__(self, parts: Sequence[Projector], samples: int, dims: Sequence[int], device: torch.device) -> None:
        self._dims, self._images = dims, [part.image(samples, dims, device) for part in parts]
        self._of = {name: image for part, image in zip(parts, self._images, strict=True) for name in part.shapes}

    def add(self, name: str, use: LayerFactor) -> None:
        """Add one use of a parameter."""
        self._of[name].add(name, use)

    def finished(self) -> dict[int, Tensor]:
        """Return the projected rows, [samples, parts, dim] by dim."""
        images = [image.finished() for image in self._images]
        return {dim: torch.stack([rows[dim] for rows in images], 1) for dim in self._dims}


def fused_rows(
    model: nn.Module, batch: Batch, parts: Sequence[Projector], dims: Sequence[int], reduction: Reduction = "mean"
) -> Fused:
    """Project each layer's gradients during the backward pass; `Factored` does not form them.

    Args:
        model: A causal language model.
        batch: B samples.
        parts: The projections of P parts of its parameters.
        dims: Widths of the rows.
        reduction: How a sample's loss reduces over its targets.

    Raises:
        Unseen: If the hooks miss a use of a parameter.
    """
    batch = padded_width(batch)
    samples, device = len(batch.labels), batch.labels.device
    images = Images(parts, samples, dims, device)
    squares = [SquareNorms(samples, device) for _ in parts]
    of = {name: norms for part, norms in zip(parts, squares, strict=True) for name in part.shapes}

    def take(name: str, use: LayerFactor, last: bool) -> None:
        images.add(name, use)
        of[name].take(name, use, last)

    losses = hooks.all_seen(hooks.backward(model, batch, take, reduction))
    empty = no_targets(batch)
    rows = {dim: zeroed(projected, empty) for dim, projected in images.finished().items()}
    return Fused(rows, losses, zeroed(torch.stack([norms.total() for norms in squares], 1), empty))


def looped_rows(
    model: nn.Module,
    batch: Batch,
    parts: Sequence[Projector],
    dims: Sequence[int],
    reduction: Reduction = "mean",
    sharded: bool = False,
) -> dict[int, Tensor]:
    """Compute the rows of `fused_rows`, [B, P, dim] by dim, by one backward pass per sample, as a reference."""
    rows = []
    for sample in batch.split(1):
        images = Images(parts, 1, dims, batch.labels.device)
        if sharded:
            gradients: Iterable[tuple[str, Tensor]] = loop.of_sharded(model, sample, reduction)
        else:
            gradients = loop.gradients(model, sample, reduction).gradient.items()
        for name, gradient in gradients:
            images.add(name, Direct(gradient))
        rows.append(images.finished())
    return {dim: torch.cat([of_sample[dim] for of_sample in rows]) for dim in dims}
