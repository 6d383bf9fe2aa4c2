"""DeMo: every rank keeps its own momentum, and the ranks average what moves most in it; the step is its sign.

Peng et al., "DeMo: Decoupled Momentum Optimization" (arXiv:2411.19870, 2024, Algorithm 1). A rank's momentum is its
residual of error feedback: the reducer adds ``lr * gradient`` to it, sends the largest coefficients of its cosine
transform (`dcttopk`), and takes what was sent away from it. The momentum's decay is the reducer's ``ef_decay``. With
one rank nothing is sent or kept, and the step is the sign of the gradient.

The average is over all ranks. The authors' code averages over the ranks that sent a coefficient, which changes its size
and not its sign.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from pydantic import InstanceOf
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.base.flags import NOT_NEGATIVE
from gradwire.base.strict import checked_arguments
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.parallel.model import local
from gradwire.comm.parallel.optimizers.base import AnyCompressor, Communicating
from gradwire.comm.parallel.strategy import clip_grad_norm


# Why: docs/decisions.md, "DeMo's momentum is a residual".
class DeMo(Communicating):
    """DeMo; see the module for the algorithm.

    Args:
        params: Parameters or parameter groups, as for torch's optimizers.
        model: As for `diloco.DiLoCo`.
        compressor: Encodes the momentum. One that sends nearly all of it, such as int8, leaves none for later steps.
        reducer: A reducer of your own instead of ``compressor`` and ``options``; used by this optimizer only.
        lr: Learning rate, of groups that have none.
        weight_decay: Decoupled weight decay, of groups that have none.
        options: Options of `Reducer`; ``ef_decay``, the momentum's decay, is 0.999 unless given.

    Raises:
        BadInput: As `Communicating.attach`.
    """

    @checked_arguments
    def __init__(
        self,
        params: Iterable[Any],
        model: nn.Module,
        *,
        compressor: AnyCompressor = "dcttopk",
        reducer: InstanceOf[Reducer] | None = None,
        lr: Annotated[float, NOT_NEGATIVE] = 1e-3,
        weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0,
        **options: Any,
    ) -> None:
        Optimizer.__init__(self, params, {"lr": lr, "weight_decay": weight_decay})
        self.attach(model, compressor, reducer, options if reducer else {"ef_decay": 0.999, **options})
        shapes = [(name, tuple(local(p).shape)) for name, p in self.parameters.items()]
        self.layout = Layout.dim0(shapes, self.reducer.world)
        self.delivered: dict[str, Tensor] = {}  # the mean of what the ranks sent, from `average` to `move`

    @property
    def dense_steps(self) -> int:
        """The reducer's."""
        return self.reducer.codec.options.dense_steps

    def average(self, max_norm: float, total: Tensor | None) -> tuple[float, bool]:
        """As `Communicating.communicate`; the norm is the root mean square of the ranks' norms, each clipped alone."""
        norm = clip_grad_norm(self.model, max_norm)
        rates = {p: group["lr"] for group in self.param_groups for p in group["params"]}
        self.delivered = {name: rates[p] * local(gradient_of(p)) for name, p in self.parameters.items()}
        mean = self.reducer.all_reduce(self.layout.pack(self.delivered), self.layout)
        self.layout.unpack(mean, self.delivered)
        return self.finish(norm, total)

    def move(self) -> None:
        """Move every element by its learning rate."""
        signs = {self.parameters[name]: mean.sign_() for name, mean in self.delivered.items()}
        for group in self.param_groups:
            for p in group["params"]:
                if p in signs:
                    local(p).mul_(1 - group["lr"] * group["weight_decay"]).add_(signs[p], alpha=-group["lr"])
        self.delivered = {}


def gradient_of(p: nn.Parameter) -> Tensor:
    """Return a parameter's gradient; zeros where it has none."""
    return torch.zeros_like(p) if p.grad is None else p.grad
