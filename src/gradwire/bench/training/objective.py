"""The loss that an optimizer step differentiates: the plain mean, or the clipped loss of private training.

Shape legend: B = samples of a micro-batch, W = world size, N = expected samples of a private step over all ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.attribution.persample.batch import losses_of
from gradwire.attribution.persample.batch import n_targets as targets_of
from gradwire.attribution.persample.norms import check_repeatable, check_unmixed, coefficients, norms
from gradwire.bench.config import Precision, Training
from gradwire.bench.training.evaluate import loss_sum
from gradwire.bench.training.noise import noisy
from gradwire.comm.collectives.world import World
from gradwire.lm.data.batches import Batch


class Plain:
    """The mean over the targets of all ranks and micro-batches.

    Args:
        precision: ``fp32``; or ``bf16``: the forward pass runs under autocast, with float32 weights. The loss and the
            gradients of the weights are float32 in both.
    """

    passes = 1
    """Forward and backward passes over a micro-batch."""

    def __init__(self, precision: Precision = "fp32") -> None:
        self.precision = precision

    def begin(self, model: nn.Module, micro_batches: Sequence[Batch], step: int) -> None:
        """Prepare the step from its micro-batches, before the first forward pass."""

    def loss(self, model: nn.Module, batch: Batch, n_targets: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's share of the loss to differentiate and of the step's mean loss per target.

        Args:
            model: The wrapped model.
            batch: The next of the micro-batches passed to `begin`.
            n_targets: Targets of all ranks and micro-batches in this step.
            last: Whether this is the step's last micro-batch.
        """
        # Without a cache: FSDP frees and refills the weights that it would be keyed by, and each is cast once anyway.
        mixed = torch.autocast(
            batch.input_ids.device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False
        )
        with mixed:
            loss = loss_sum(model, batch) / n_targets.clamp(min=1)  # a step may have prompts alone
        return loss, loss.detach()

    def totals(self) -> list[Tensor]:
        """This rank's statistics of the step, to be summed over ranks."""
        return []

    def columns(self, totals: Sequence[float]) -> dict[str, Any]:
        """The step's columns, from the sums of `totals` over ranks."""
        return {}


class Private(Plain):
    """DP-SGD: the sum of per-sample gradients clipped to C, plus noise, divided by N.

    A sample's loss is the mean over its own targets. N is a constant, so only the noisy sum depends on the samples.
    Each rank draws noise of standard deviation σC/√W, which makes σC in the sum over ranks.

    Args:
        model: The unwrapped model; it must not mix samples or use dropout.
        training: The settings, with C and σ.
        seed: Seed of the noise.
        world: The process group and this rank's position in it.

    Raises:
        BadInput: If the model mixes samples or its forward pass is not repeatable.
    """

    passes = 2

    def __init__(self, model: nn.Module, training: Training, seed: int, world: World) -> None:
        super().__init__()
        check_unmixed(model)
        check_repeatable(model)
        assert training.dp_max_grad_norm is not None
        self.max_norm, self.seed, self.rank = training.dp_max_grad_norm, seed, world.rank
        self.expected = training.batch_size * training.grad_accum_steps * world.world_size
        # The loop multiplies by W, because strategies average over ranks.
        self.std = math.sqrt(world.world_size) * training.dp_noise_multiplier * self.max_norm / self.expected
        self._coefficients = deque[Tensor]()
        self._totals = torch.zeros(3)

    def begin(self, model: nn.Module, micro_batches: Sequence[Batch], step: int) -> None:
        """Compute every sample's norm and clipping coefficient, before any gradient accumulates."""
        self._step = step
        inner = getattr(model, "module", model)  # DDP's own forward would wait for gradients
        found = [norms(inner, batch).square.sqrt() for batch in micro_batches]
        self._coefficients = deque(coefficients(norm, self.max_norm) for norm in found)
        real = torch.tensor([id_ != "" for batch in micro_batches for id_ in batch.sample_id])
        of_samples = torch.cat(found)[real.to(found[0].device)]
        counts = (real.sum(), (of_samples > self.max_norm).sum(), of_samples.sum())
        self._totals = torch.stack([count.to(of_samples.device, torch.float32) for count in counts])

    def loss(self, model: nn.Module, batch: Batch, n_targets: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """The micro-batch's clipped loss; the backward pass of the last micro-batch adds the step's noise."""
        coefficient = self._coefficients.popleft()
        with noisy(model, self.std, self.seed, self._step, self.rank) if last and self.std else nullcontext() as check:
            losses = losses_of(model, batch)
        if check is not None:
            check(losses)
        loss = (coefficient.to(losses.dtype) * losses).sum() / self.expected
        total = (losses.detach() * targets_of(batch.labels)).sum()
        return loss, total / n_targets.clamp(min=1)  # Poisson sampling may draw no sample

    def totals(self) -> list[Tensor]:
        """Number of samples, number of clipped samples and sum of norms."""
        return list(self._totals)

    def columns(self, totals: Sequence[float]) -> dict[str, Any]:
        """``samples``, ``clipped_samples``, ``clipped_fraction`` and ``sample_norm_mean``."""
        samples, clipped, total = totals
        fields = {"samples": int(samples), "clipped_samples": int(clipped)}
        of_each = (clipped / samples, total / samples) if samples else (None, None)
        return fields | dict(zip(("clipped_fraction", "sample_norm_mean"), of_each, strict=True))
