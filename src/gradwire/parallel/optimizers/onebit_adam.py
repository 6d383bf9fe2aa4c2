"""1-bit Adam: after a warm-up the variance is frozen, and the ranks average compressed momenta.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed" (ICML 2021,
Algorithm 1). Any compressor will do. Each rank adds its own gradient to the momentum, sends that, and goes on with the
mean that all ranks decode; error feedback is the reducer's, on what a rank sends and on what an owner of a row sends
(``algorithm: exchange``).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gradwire.parallel.optimizers.base import CommunicatingAdam


class OneBitAdam(CommunicatingAdam):
    """See the module."""

    def exchange_momenta(self, gradients: dict[str, Tensor]) -> None:
        """Average the momenta."""
        momenta = {name: self.momentum(p, gradients[name]) for name, p in self.trained.items()}
        self.delivered = self.average(momenta)

    def apply(self, delivered: Mapping[str, Tensor]) -> None:
        """A step of Adam with the frozen variance; parameters stay bit-equal on all ranks."""
        for name, p in self.trained.items():
            group, state = self.group_of[p], self.state[p]
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.addcdiv_(delivered[name].to(p.dtype), self.denominator(p), value=-self.rate(p))
            state["exp_avg"].copy_(delivered[name])
            state["step"] += 1
