"""Accumulation of squared gradient norms during a backward pass."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from gradwire.attribution.persample.layer_factors import LayerFactor, square_norm


class SquareNorms:
    """Sums squared norms over parameters. The uses of a tied parameter are added before its norm is taken.

    Args:
        samples: B.
        device: Device of the pass.
    """

    def __init__(self, samples: int, device: torch.device) -> None:
        self._met = defaultdict[str, list[LayerFactor]](list)
        self._squares = torch.zeros(samples, dtype=torch.float64, device=device)

    def take(self, name: str, use: LayerFactor, last: bool) -> None:
        """Add a use; the last use of a parameter adds its squared norm to the sum."""
        self._met[name].append(use)
        if last:
            self._squares.add_(square_norm(self._met.pop(name)))

    def total(self) -> Tensor:
        """Return the sums, float64 [B], after the pass."""
        return self._squares
