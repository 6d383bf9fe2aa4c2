"""Losses: of a split, and the one that a step differentiates, the plain mean or the clipped loss of private training.

Shape legend: B = samples of a micro-batch, W = world size, N = expected samples of a private step over all ranks.

The guarantee of private training is (ε, δ)-differential privacy per sample, under zero-out adjacency. Neighboring data
sets have the same size; in one of them, the gradient of one sample is zero. The size may therefore determine rates,
epochs and the assignment of samples to ranks. One sample changes the sum of clipped gradients by at most C, so noise of
standard deviation σC makes it a Gaussian mechanism with multiplier σ; post-processing of the noisy sum costs nothing.

- Sampling. `poisson`: each sample joins each step independently at random, so the accountant applies amplification by
  subsampling. `shuffled`: a sample is in one step of each epoch. No amplification is claimed: an epoch costs as much as
  one step on all samples. Accounting for shuffled batches as if they were Poisson-sampled gives too small an ε
  (Chua et al., "How Private are DP-SGD Implementations?", ICML 2024).
- Compression. Each of W ranks draws noise of standard deviation σC/√W, which makes σC in their sum for any W. A sum of
  lossy encodings is not a function of that sum, so each rank's message must be private by itself, with a multiplier of
  only σ/√W, which is the one accounted. This requires that a sample is in one rank's message per step and that drawing
  it moves no other sample to another rank: `lm.data.batches.poisson_steps`.

Zero-out adjacency: Kairouz et al., "Practical and Private (Deep) Learning without Sampling or Shuffling" (ICML 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.attribution.front.accounting import Guarantee, check_accountant
from gradwire.attribution.front.private import PrivateGradients
from gradwire.attribution.persample.batch import losses_of
from gradwire.attribution.persample.batch import n_targets as targets_of
from gradwire.attribution.persample.norms import check_repeatable, check_unmixed, norms
from gradwire.base.errors import BadInput
from gradwire.bench.config import Cell, Precision, Training
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.world import World
from gradwire.lm.data.batches import Batch

Draw = Callable[[str, Tensor, torch.device], Tensor | None]
ADJACENCY = "zero-out"


class Quality(NamedTuple):
    """Mean negative log-likelihood per target in nats, its exponential, and the number of targets."""

    loss: float
    ppl: float
    n_targets: int


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the cross-entropy over the batch's targets in nats, a differentiable scalar.

    Samples are right-padded and attention is causal, so no target sees padding and no attention mask is needed.
    """
    return cross_entropy(model(batch.input_ids, use_cache=False).logits, batch.labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy in float32: of logits [B, T, vocabulary] and labels [B, T]."""
    predicted, targets = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return F.cross_entropy(predicted, targets, ignore_index=-100, reduction="sum")


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Quality:
    """Loss and perplexity over all ranks' ``batches``; every rank must have the same number of them.

    Raises:
        BadInput: If no sample has a target.
    """
    training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        local = batch.to(device)
        totals += torch.stack([loss_sum(model, local).double(), torch.tensor(local.n_targets, device=device).double()])
    model.train(training)
    ops.all_reduce(totals, purpose="control")
    if not totals[1]:
        raise BadInput("no sample of the split has a target, so there is no loss: use other data or a larger length.")
    loss = float(totals[0] / totals[1])
    return Quality(loss, math.exp(loss) if loss < 700 else math.inf, int(totals[1]))


class Plain:
    """The mean over the targets of all ranks and micro-batches.

    Args:
        precision: ``fp32``; or ``bf16``: the forward pass runs under autocast, with float32 weights. The loss and the
            gradients of the weights are float32 in both.
        compiled: Compile the cross-entropy: its passes over the logits, the largest tensors of a step, become few.
    """

    passes = 1
    """Forward and backward passes over a micro-batch."""

    def __init__(self, precision: Precision = "fp32", *, compiled: bool = False) -> None:
        self.precision = precision
        self._cross_entropy = torch.compile(cross_entropy) if compiled else cross_entropy

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
            logits = model(batch.input_ids, use_cache=False).logits  # [B, T, vocabulary]
            # a step may have prompts alone
            loss = self._cross_entropy(logits, batch.labels) / n_targets.clamp(min=1)
        return loss, loss.detach()

    def totals(self) -> list[Tensor]:
        """This rank's statistics of the step, to be summed over ranks."""
        return []

    def columns(self, totals: Sequence[float]) -> dict[str, Any]:
        """The step's columns, from the sums of `totals` over ranks."""
        return {}


class Private(Plain):
    """DP-SGD: the mean of clipped gradients plus noise, by `attribution.front.private`.

    A sample's loss is the mean over its own targets.

    Args:
        model: The unwrapped model; it must not mix samples.
        training: The settings, with C and σ.
        seed: Seed of the noise.
        world: The process group and this rank's position in it.

    Raises:
        BadInput: If the model mixes samples.
    """

    passes = 2
    """Backward passes over a micro-batch: norms, then gradients."""

    def __init__(self, model: nn.Module, training: Training, seed: int, world: World) -> None:
        super().__init__()
        check_unmixed(model)
        assert training.dp_max_grad_norm is not None
        self.expected = training.batch_size * training.grad_accum_steps * world.world_size
        self.max_norm, self._inner, self._world = training.dp_max_grad_norm, model, world
        self.private = PrivateGradients(
            model,
            noise_multiplier=training.dp_noise_multiplier,
            max_grad_norm=training.dp_max_grad_norm,
            batch_size=self.expected,
            seed=seed,
            rank=world.rank,
            ranks=world.world_size,
        )
        self._totals = torch.zeros(3)

    def begin(self, model: nn.Module, micro_batches: Sequence[Batch], step: int) -> None:
        """Begin the step's statistics and noise."""
        self.private.step, self._totals = step, torch.zeros(3, device=micro_batches[0].labels.device)

    def loss(self, model: nn.Module, batch: Batch, n_targets: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """The micro-batch's clipped loss; the backward pass of the last micro-batch adds the step's noise."""
        with self.private.watched():
            losses = losses_of(model, batch)

        def missed(names: list[str]) -> Tensor:
            check_repeatable(self._inner)
            return norms(self._inner, batch, names=names).square

        clipped = self.private.clipped(losses, last, missed) / self._world.world_size  # the loop multiplies by W
        of_samples = self.private.norms[torch.tensor([id_ != "" for id_ in batch.sample_id]).to(losses.device)]
        counts = (torch.tensor(len(of_samples)), (of_samples > self.max_norm).sum(), of_samples.sum())
        self._totals += torch.stack([count.to(self._totals) for count in counts])
        total = (losses.detach() * targets_of(batch.labels)).sum()
        return clipped, total / n_targets.clamp(min=1)  # Poisson sampling may draw no sample

    def totals(self) -> list[Tensor]:
        """Number of samples, number of clipped samples and sum of norms."""
        return list(self._totals)

    def columns(self, totals: Sequence[float]) -> dict[str, Any]:
        """``samples``, ``clipped_samples``, ``clipped_fraction`` and ``sample_norm_mean``."""
        samples, clipped, total = totals
        fields = {"samples": int(samples), "clipped_samples": int(clipped)}
        of_each = (clipped / samples, total / samples) if samples else (None, None)
        return fields | dict(zip(("clipped_fraction", "sample_norm_mean"), of_each, strict=True))


# Why: docs/decisions.md, "ε for what really happens".
def guarantee(training: Training, cell: Cell, samples: int, world_size: int) -> Guarantee:
    """Return the privacy guarantee of a run.

    Args:
        training: Settings of private training, with the batch size.
        cell: The compressor setting.
        samples: Samples in the training split.
        world_size: Number of ranks.

    Raises:
        BadInput: If δ is too large, a step takes more samples than there are or could take one twice, or Opacus is not
            installed.
    """
    if training.dp_noise_multiplier:
        check_accountant()
    batch = training.batch_size * training.grad_accum_steps * world_size
    if batch > samples:
        raise BadInput(f"a private step takes {batch} samples, but the training split has {samples}; take fewer.")
    per_epoch, cut = divmod(samples // world_size // training.batch_size, training.grad_accum_steps)
    if cut and training.dp_sampling == "shuffled":
        raise BadInput(
            f"an epoch has {per_epoch * training.grad_accum_steps + cut} micro-batches, not a multiple of "
            f"--grad_accum_steps {training.grad_accum_steps}: a private step could hold a sample twice; use "
            "--dp_sampling poisson."
        )
    if training.dp_delta * samples >= 1:
        raise BadInput(
            f"--dp_delta {training.dp_delta:g} is not below 1 / {samples} (samples), so publishing one would be "
            f"allowed; use a value well below {1 / samples:.1g}."
        )
    exact = world_size == 1 or cell.method == "none"
    return Guarantee(
        multiplier=training.dp_noise_multiplier / (1 if exact else math.sqrt(world_size)),
        delta=training.dp_delta,
        sample_rate=batch / samples if training.dp_sampling == "poisson" else None,
        steps_per_epoch=per_epoch,
    )
