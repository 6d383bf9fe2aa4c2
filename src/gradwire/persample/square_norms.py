"""Squared norms that grow as a backward pass meets one use of a parameter after the other."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from gradwire.persample import hooks
from gradwire.persample.uses import Use, square_norm


class SquareNorms:
    """The sum over parameters; a tied parameter's uses wait for each other, since the norm of their sum is wanted.

    Args:
        model: Before its backward pass.
        samples: B.
        device: Where the pass is.
    """

    def __init__(self, model: nn.Module, samples: int, device: torch.device) -> None:
        self._expected = hooks.uses(model)
        self._met = defaultdict[str, list[Use]](list)
        self._squares = torch.zeros(samples, dtype=torch.float64, device=device)

    def take(self, name: str, use: Use) -> None:
        """Add a use."""
        self._met[name].append(use)
        if len(self._met[name]) == self._expected[name]:
            self._squares.add_(square_norm(self._met.pop(name)))

    def total(self) -> Tensor:
        """The sums, float64 [B], once the pass is over; it may have gone through a layer less often than expected."""
        for uses in self._met.values():
            self._squares.add_(square_norm(uses))
        self._met.clear()
        return self._squares
