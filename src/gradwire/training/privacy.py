"""What a private run guarantees: (ε, δ)-differential privacy for one sample, under zero-out adjacency.

Neighbouring data sets have as many samples, and in one of them one sample contributes nothing: its gradient is zero.
So their size may decide rates, epochs and which rank has which sample, as it does here. The sum of clipped gradients
changes by at most C for one sample, so noise of standard deviation σC on it is a Gaussian mechanism of multiplier σ;
what happens to the noisy sum afterwards costs nothing. Opacus's accountant composes steps.

- Sampling. `poisson`: each sample is in each step by a toss of its own coin, so most steps say nothing of it, which
  makes them cheaper ("amplification"). `shuffled`: a sample is in one step of each epoch. No amplification is claimed
  for that: an epoch costs as much as one step on all samples. To account for shuffled batches as if they were Poisson's
  gives too small an ε (Chua et al., "How Private are DP-SGD Implementations?", ICML 2024).
- Compression. W ranks draw noise of standard deviation σC/√W each, which makes σC in their sum, whatever W. A sum of
  encodings is no function of that sum unless encodings are exact: each rank's own message must be private by itself,
  and it carries a multiplier of σ/√W only. That is accounted then. It asks that a sample is in one rank's message of a
  step, and that drawing it moves no other sample to another rank: `data.batches.poisson_steps`.

Zero-out adjacency: Kairouz et al., "Practical and Private (Deep) Learning without Sampling or Shuffling" (ICML 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from gradwire.config import Cell, Training
from gradwire.errors import BadInput

ADJACENCY = "zero-out"
TIGHT_FROM = 0.5  # multipliers below are accounted by Rényi bounds: the tight accountant's grid would need gigabytes


@dataclass(frozen=True)
class Guarantee:
    """What determines ε.

    Args:
        multiplier: The noise's standard deviation over C, as accounted.
        delta: δ.
        sample_rate: With Poisson sampling, the probability that a sample is in a step; None if shuffled.
        steps_per_epoch: Optimizer steps in which shuffling shows no sample twice.
    """

    multiplier: float
    delta: float
    sample_rate: float | None
    steps_per_epoch: int

    @property
    def accountant(self) -> str:
        """What ε is computed by: ``prv`` (tight), or ``rdp`` where that would need too much memory."""
        return "prv" if self.multiplier >= TIGHT_FROM else "rdp"

    def epsilon(self, steps: int) -> float | None:
        """ε after so many optimizer steps, an upper bound; None where nothing is guaranteed, as without noise."""
        if not self.multiplier:
            return None
        if not steps:
            return 0.0
        import numpy as np
        from opacus.accountants import PRVAccountant, RDPAccountant

        rate, times = (self.sample_rate, steps) if self.sample_rate else (1.0, math.ceil(steps / self.steps_per_epoch))
        accountant: Any = PRVAccountant() if self.accountant == "prv" else RDPAccountant()
        accountant.history = [(self.multiplier, rate, times)]
        with np.errstate(divide="ignore", over="ignore"):  # the logarithm of 1 - rate, with a rate of 1
            found = float(accountant.get_epsilon(delta=self.delta))
        return found if math.isfinite(found) else None


def guarantee(training: Training, cell: Cell, samples: int, world_size: int) -> Guarantee:
    """What a run of these settings guarantees.

    Args:
        training: The settings, private ones, with their batch size.
        cell: How gradients travel.
        samples: Of the training split.
        world_size: Number of ranks.

    Raises:
        BadInput: If δ is no better than to publish a sample, if a step takes more samples than there are, or could take
            one twice; if Opacus is not installed.
    """
    if training.dp_noise_multiplier and find_spec("opacus") is None:
        raise BadInput("private training asks Opacus what it spends: pip install 'gradwire[private]'.")
    batch = training.batch_size * training.grad_accum_steps * world_size
    if batch > samples:
        raise BadInput(f"a private step takes {batch} samples, and the training split has {samples}: take fewer.")
    per_epoch, cut = divmod(samples // world_size // training.batch_size, training.grad_accum_steps)
    if cut and training.dp_sampling == "shuffled":
        raise BadInput(
            f"an epoch has {per_epoch * training.grad_accum_steps + cut} micro-batches, which do not make whole "
            f"private steps of {training.grad_accum_steps}: one could hold a sample twice. Take --dp_sampling poisson."
        )
    if training.dp_delta * samples >= 1:
        raise BadInput(
            f"--dp_delta {training.dp_delta:g} is not below 1 / {samples}, the training samples: it would allow to "
            f"publish one of them. Give one well below {1 / samples:.1g}."
        )
    exact = world_size == 1 or cell.method == "none"
    return Guarantee(
        multiplier=training.dp_noise_multiplier / (1 if exact else math.sqrt(world_size)),
        delta=training.dp_delta,
        sample_rate=batch / samples if training.dp_sampling == "poisson" else None,
        steps_per_epoch=per_epoch,
    )
