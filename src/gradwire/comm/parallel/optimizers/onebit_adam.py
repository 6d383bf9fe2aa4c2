"""1-bit Adam: after a warm-up the variance is frozen, and the ranks average compressed momenta.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed" (ICML 2021,
Algorithm 1). Each rank adds its own gradient to the momentum, sends it through any compressor, and continues with the
decoded mean, so momenta and parameters stay equal. Error feedback is the reducer's: on the momentum that a rank sends,
and in an exchange also on the mean that the owner of a row sends.

Both moments are corrected for their bias, as in AdamW. DeepSpeed's 1-bit Adam corrects neither, so with the same
options its steps are larger; see `base`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gradwire.comm.parallel.optimizers.base import CommunicatingAdam


class OneBitAdam(CommunicatingAdam):
    """1-bit Adam; see the module for the algorithm."""

    def exchange_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Average the momenta."""
        self.delivered = self.means(momenta)

    def apply(self, delivered: Mapping[str, Tensor]) -> None:
        """Step with the mean momenta."""
        for name, p in self.parameters.items():
            self.advance(p, delivered[name], self.rate(p))
