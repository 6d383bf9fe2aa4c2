"""What the backward passes of an optimizer step start from: the plain loss, or that of private training.

Shape legend: B = samples of a micro-batch, W = world size, N = samples of a private step over all ranks, expected.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.collectives.world import World
from gradwire.config import Training
from gradwire.data.batches import Batch
from gradwire.persample import clipping
from gradwire.persample.batch import n_targets as targets_of
from gradwire.persample.norms import check_unmixed, norms
from gradwire.training.evaluate import loss_sum
from gradwire.training.noise import noisy


class Plain:
    """The mean over the targets of all ranks and micro-batches."""

    passes = 1
    """Forward and backward passes over a micro-batch."""

    def begin(self, model: nn.Module, micro_batches: Sequence[Batch], step: int) -> None:
        """Look at the step's micro-batches before the first of them."""

    def loss(self, model: nn.Module, batch: Batch, n_targets: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """A micro-batch's share of what the gradient is of, and of the step's mean loss per target.

        Args:
            model: The wrapped model.
            batch: The next of the micro-batches that `begin` saw.
            n_targets: Of all ranks and micro-batches in this step.
            last: Whether it is the step's last one.
        """
        loss = loss_sum(model, batch) / n_targets
        return loss, loss.detach()

    def totals(self) -> list[Tensor]:
        """What this rank tells of the step, to be summed over the ranks."""
        return []

    def told(self, totals: Sequence[float]) -> dict[str, Any]:
        """The step's columns, from the sums of `totals`."""
        return {}


class Private(Plain):
    """DP-SGD: each sample's gradient, of the mean over its own targets, is clipped to C; the sum gets noise; over N.

    N is a constant, so that nothing but the noisy sum depends on the samples. Each rank draws noise of standard
    deviation σC/√W, which makes σC in the sum over ranks. A rank's samples are its own, so that its norms are complete.

    Args:
        model: Unwrapped; must not mix samples nor drop activations.
        training: C and σ.
        seed: Of the noise.
        world: This rank's place.

    Raises:
        BadInput: If the model will not do.
    """

    passes = 2

    def __init__(self, model: nn.Module, training: Training, seed: int, world: World) -> None:
        check_unmixed(model)
        clipping.check_repeatable(model)
        assert training.dp_max_grad_norm is not None
        self.max_norm, self.seed, self.rank = training.dp_max_grad_norm, seed, world.rank
        self.expected = training.batch_size * training.grad_accum_steps * world.world_size
        # The loop multiplies by W, because strategies average over ranks.
        self.std = math.sqrt(world.world_size) * training.dp_noise_multiplier * self.max_norm / self.expected
        self._coefficients = deque[Tensor]()
        self._totals = torch.zeros(3)

    def begin(self, model: nn.Module, micro_batches: Sequence[Batch], step: int) -> None:
        """Clip by the norms of all samples, told before any gradient accumulates."""
        self._step = step
        inner = getattr(model, "module", model)  # DDP's own forward would wait for gradients
        found = [norms(inner, batch).square.sqrt() for batch in micro_batches]
        self._coefficients = deque(clipping.coefficients(norm, self.max_norm) for norm in found)
        real = torch.tensor([id_ != "" for batch in micro_batches for id_ in batch.sample_id])
        of_samples = torch.cat(found)[real.to(found[0].device)]
        counts = (real.sum(), (of_samples > self.max_norm).sum(), of_samples.sum())
        self._totals = torch.stack([count.to(of_samples.device, torch.float32) for count in counts])

    def loss(self, model: nn.Module, batch: Batch, n_targets: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """The micro-batch's clipped losses; in the last one's backward pass the step's noise is added."""
        coefficient = self._coefficients.popleft()
        with noisy(model, self.std, self.seed, self._step, self.rank) if last and self.std else nullcontext():
            losses = clipping.losses(model, batch)
        loss = (coefficient.to(losses.dtype) * losses).sum() / self.expected
        total = (losses.detach() * targets_of(batch.labels)).sum()
        return loss, total / n_targets.clamp(min=1)  # Poisson may draw no sample at all

    def totals(self) -> list[Tensor]:
        """Samples, clipped ones, the sum of norms."""
        return list(self._totals)

    def told(self, totals: Sequence[float]) -> dict[str, Any]:
        """``samples``, and of them ``clipped_fraction`` and ``sample_norm_mean``."""
        samples, clipped, total = totals
        fields = {"samples": int(samples), "clipped_samples": int(clipped)}
        of_each = (clipped / samples, total / samples) if samples else (None, None)
        return fields | dict(zip(("clipped_fraction", "sample_norm_mean"), of_each, strict=True))
