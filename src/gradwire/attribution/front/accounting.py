"""Upper bounds on ε of private steps, by Opacus's accountants.

They compose steps: by Rényi divergences, and by distributions of the privacy loss on a grid (Gopi et al., "Numerical
Composition of Differential Privacy", NeurIPS 2021), which is tighter.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

from gradwire.base.errors import BadInput

EPSILON_ERROR = 0.01  # of the grid's bound
BYTES_PER_POINT = 192  # of the grid, at most: 182 measured with Opacus 1.6
LARGEST_GRID = 1 << 30  # bytes


def check_accountant() -> None:
    """Check that Opacus is installed.

    Raises:
        BadInput: If it is not.
    """
    if find_spec("opacus") is None:
        raise BadInput("private training needs Opacus: pip install 'gradwire[bench]'.")


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

    def spent(self, steps: int) -> Spent:
        """Upper bounds on ε after ``steps`` optimizer steps; none without a guarantee, such as without noise."""
        if not self.multiplier:
            return Spent(None, None)
        if not steps:
            return Spent(0.0, 0.0)
        import numpy as np
        from opacus.accountants import PRVAccountant, RDPAccountant

        rate, times = (self.sample_rate, steps) if self.sample_rate else (1.0, math.ceil(steps / self.steps_per_epoch))

        def bound(accountant: Any, **options: float) -> float | None:
            accountant.history = [(self.multiplier, rate, times)]
            epsilon = float(accountant.get_epsilon(delta=self.delta, **options))
            return epsilon if math.isfinite(epsilon) else None

        # log(1 - rate) with a rate of 1; a bound of the smallest order, which holds and could be smaller
        with np.errstate(divide="ignore", over="ignore"), warnings.catch_warnings(action="ignore"):
            points = grid_points(self.multiplier, rate, times, self.delta)
            fits = points * BYTES_PER_POINT <= LARGEST_GRID
            prv = bound(PRVAccountant(), eps_error=EPSILON_ERROR) if fits else None
            return Spent(prv, bound(RDPAccountant()))


class Spent(NamedTuple):
    """Upper bounds on ε by accountant; both hold.

    Attributes:
        prv: By distributions of the privacy loss; None if their grid would need more memory than `LARGEST_GRID`.
        rdp: By Rényi divergences.
    """

    prv: float | None
    rdp: float | None

    @property
    def accountant(self) -> str | None:
        """The accountant with the smaller bound; None if there is none."""
        bounds = {name: bound for name, bound in self._asdict().items() if bound is not None}
        return min(bounds, key=bounds.__getitem__) if bounds else None

    @property
    def epsilon(self) -> float | None:
        """The smaller bound."""
        return getattr(self, self.accountant) if self.accountant else None


def grid_points(multiplier: float, rate: float, times: int, delta: float) -> float:
    """Return the number of points of the grid that Opacus's PRV accountant would compose ``times`` steps on."""
    from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV, compute_safe_domain_size

    error = delta / 1000  # the accountant's own choice
    prvs = [PoissonSubsampledGaussianPRV(rate, multiplier)]
    options: dict[str, Any] = {"max_self_compositions": [times], "eps_error": EPSILON_ERROR, "delta_error": error}
    half = float(compute_safe_domain_size(prvs=prvs, **options))
    return 2 * half * math.sqrt(times * math.log(12 / error) / 2) / EPSILON_ERROR
