"""The guarantee of private training: (ε, δ)-differential privacy per sample, under zero-out adjacency.

Neighboring data sets have the same size; in one of them, the gradient of one sample is zero. The size may therefore
determine rates, epochs and the assignment of samples to ranks. One sample changes the sum of clipped gradients by
at most C, so noise of standard deviation σC makes it a Gaussian mechanism with multiplier σ; post-processing of the
noisy sum costs nothing. Opacus's accountant composes steps.

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
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.bench.config import Cell, Training

ADJACENCY = "zero-out"
TIGHT_FROM = 0.5  # smaller multipliers use Rényi bounds: the tight accountant's grid would need gigabytes


@dataclass(frozen=True)
class Guarantee:
    """The parameters that determine ε.

    Args:
        multiplier: The noise's standard deviation over C, as accounted.
        delta: δ.
        sample_rate: The probability that a sample is in a step with Poisson sampling; None if shuffled.
        steps_per_epoch: Optimizer steps per epoch; shuffling repeats no sample within one.
    """

    multiplier: float
    delta: float
    sample_rate: float | None
    steps_per_epoch: int

    @property
    def accountant(self) -> str:
        """The accountant: ``prv`` (tight), or ``rdp`` if that would need too much memory."""
        return "prv" if self.multiplier >= TIGHT_FROM else "rdp"

    def epsilon(self, steps: int) -> float | None:
        """An upper bound on ε after ``steps`` optimizer steps; None without a guarantee, such as without noise."""
        if not self.multiplier:
            return None
        if not steps:
            return 0.0
        import numpy as np
        from opacus.accountants import PRVAccountant, RDPAccountant

        rate, times = (self.sample_rate, steps) if self.sample_rate else (1.0, math.ceil(steps / self.steps_per_epoch))
        accountant: Any = PRVAccountant() if self.accountant == "prv" else RDPAccountant()
        accountant.history = [(self.multiplier, rate, times)]
        with np.errstate(divide="ignore", over="ignore"):  # log(1 - rate) with a rate of 1
            epsilon = float(accountant.get_epsilon(delta=self.delta))
        return epsilon if math.isfinite(epsilon) else None


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
    if training.dp_noise_multiplier and find_spec("opacus") is None:
        raise BadInput("private training needs Opacus: pip install 'gradwire[bench]'.")
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
