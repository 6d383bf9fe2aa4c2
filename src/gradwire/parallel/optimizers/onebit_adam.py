"""1-bit Adam: after a warm-up the variance is frozen, and the ranks average compressed momenta.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed" (ICML 2021,
Algorithm 1). Each rank adds its own gradient to the momentum, sends that through any compressor, and goes on with the
mean that all ranks decode, so momenta and parameters stay equal. Error feedback is the reducer's: on what a rank sends,
and in an exchange also on what the owner of a row sends.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gradwire.parallel.optimizers.base import CommunicatingAdam


class OneBitAdam(CommunicatingAdam):
    """See the module."""

    def exchange_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Average them."""
        self.delivered = self.average(momenta)

    def apply(self, delivered: Mapping[str, Tensor]) -> None:
        """Follow the mean."""
        for name, p in self.trained.items():
            self.advance(p, delivered[name], self.rate(p))
