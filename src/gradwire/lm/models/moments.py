"""Adam's moments by parameter name, whatever file they come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

KINDS = ("exp_avg", "exp_avg_sq")


class Moments(NamedTuple):
    """Adam's state of each parameter.

    Attributes:
        path: The file.
        exp_avg: First moments, by parameter name.
        exp_avg_sq: Second moments, by parameter name.
        step: Completed steps, by parameter name.
        betas: β₁ and β₂, shared by all parameters.
        eps: ε, shared by all parameters.
    """

    path: Path
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]
    step: Mapping[str, int]
    betas: tuple[float, float]
    eps: float
