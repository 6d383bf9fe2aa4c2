"""Squared norms that grow as a backward pass meets one use of a parameter after the other."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from gradwire.persample.uses import Use, square_norm


class SquareNorms:
    """The sum over parameters; a tied parameter's uses wait for each other, since the norm of their sum is wanted.

    Args:
        samples: B.
        device: Where the pass is.
    """

    def __init__(self, samples: int, device: torch.device) -> None:
        self._met = defaultdict[str, list[Use]](list)
        self._squares = torch.zeros(samples, dtype=torch.float64, device=device)

    def take(self, name: str, use: Use, last: bool) -> None:
        """Add a use; with a parameter's last one of the pass its norm is taken."""
        self._met[name].append(use)
        if last:
            self._squares.add_(square_norm(self._met.pop(name)))

    def total(self) -> Tensor:
        """The sums, float64 [B], once the pass is over; what a layer gave may not have come to the loss."""
        for uses in self._met.values():
            self._squares.add_(square_norm(uses))
        self._met.clear()
        return self._squares
