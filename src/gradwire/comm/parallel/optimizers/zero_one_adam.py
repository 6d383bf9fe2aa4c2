"""0/1 Adam: the variance is updated at growing intervals, and then the ranks synchronise at growing intervals.

Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam" (ICLR 2023, Algorithm 1). Between
two synchronisations each rank takes Adam's steps with its own momentum. Then the ranks average their updates through
the compressor, apply the mean to the last synchronised parameters, and set the momentum to the mean one of the steps
in between.

Differences from the paper: steps that update the variance average gradients as float32, so their momentum is the exact
mean and needs no second message. And ranks send the mean momentum (the paper's u divided by the sum of learning rates),
so that residuals keep their unit when rates or intervals change; with an interval of 1 this is 1-bit Adam.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Reducer, state
from gradwire.comm.parallel.mesh import local
from gradwire.comm.parallel.optimizers.base import CommunicatingAdam


class Drift(NamedTuple):
    """A parameter's local updates since the last synchronisation.

    Attributes:
        start: The parameter at the last synchronisation.
        momentum: Mean momentum since then, weighted by the learning rates.
        moved: Sum of these rates, each with the momentum's bias correction.
        kept: Factor that weight decay has applied to ``start``.
    """

    start: Tensor
    momentum: Tensor
    moved: float = 0.0
    kept: float = 1.0


class ZeroOneAdam(CommunicatingAdam):
    """0/1 Adam; see the module for the algorithm.

    Args:
        model: As for `base.CommunicatingAdam`.
        groups: As for `base.CommunicatingAdam`.
        reducer: As for `base.CommunicatingAdam`; its first ``dense_steps`` all update the variance.
        freeze_step: The step that ends the updates of the variance, which follow the dense steps at intervals of 2, 4,
            8, ... steps; default: twice the dense steps.
        variance_kappa: Number of updates before that interval doubles.
        local_doubling: Number of steps after the freeze before the interval between synchronisations becomes 2, and
            before each further doubling; default: ``freeze_step``.
        max_local_steps: Maximum interval between synchronisations.
        steps: Number of steps of the run; the last one synchronises. None: unknown.
        options: Options of the base class.

    Raises:
        BadInput: If an option is out of range, or as the base class.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[dict[str, Any]],
        reducer: Reducer,
        *,
        freeze_step: int | None = None,
        variance_kappa: int = 16,
        local_doubling: int | None = None,
        max_local_steps: int = 16,
        steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, groups, reducer, **options)
        dense = reducer.codec.options.dense_steps
        self.freeze_step = 2 * dense if freeze_step is None else freeze_step
        self.local_doubling = self.freeze_step if local_doubling is None else local_doubling
        self.max_local_steps = max_local_steps
        self.last_step = None if steps is None else steps - 1
        for name, value in (
            ("variance_kappa", variance_kappa),
            ("local_doubling", self.local_doubling),
            ("max_local_steps", max_local_steps),
        ):
            if value < 1:
                raise BadInput(f"{name} is {value}; it must be at least 1.")
        if self.freeze_step < dense:
            raise BadInput(f"freeze_step is {freeze_step}; it must be at least dense_steps ({dense}).")
        self.updates = update_steps(dense, self.freeze_step, variance_kappa)
        self.drifts: dict[str, Drift] = {}  # by parameter; empty while the ranks are synchronised
        self.local_steps = 0  # since the last synchronisation
        self.alone = False  # whether the current step sends nothing; from `exchange` to `step`

    @property
    def averages_gradients(self) -> bool:
        """Whether the current step is in the warm-up or updates the variance."""
        return super().averages_gradients or self.reducer.step in self.updates

    @property
    def in_step(self) -> bool:
        """Whether the last step synchronised the ranks."""
        return not self.drifts

    def move(self) -> None:
        """As the base class; after the warm-up a mean gradient updates first the variance, then the momentum."""
        if self.delivered is not None or self.reducer.step <= self.reducer.codec.options.dense_steps:
            super().move()
            return
        for p in self.parameters.values():
            beta1, beta2 = self.group_of(p)["betas"]
            assert p.grad is not None
            gradient = local(p.grad)
            self.kept(p, "exp_avg_sq").mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            self.state[p]["variance_steps"] += 1
            self.advance(p, torch.lerp(self.kept(p, "exp_avg"), gradient, 1 - beta1), self.rate(p))

    def exchange_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Average the mean momenta since the last synchronisation if one is due; otherwise send nothing."""
        step = self.reducer.step
        interval = min(2 ** (max(0, step - self.freeze_step) // self.local_doubling), self.max_local_steps)
        self.alone = self.local_steps + 1 < interval and step != self.last_step
        if self.alone:
            self.reducer.skip(self.layout)
            self.delivered = dict(momenta)
        else:
            self.delivered = self.means({name: self._mean(name, momentum) for name, momentum in momenta.items()})

    def apply(self, delivered: Mapping[str, Tensor]) -> None:
        """Take a local step, or a step from the last synchronised parameters with the mean momenta."""
        for name, p in self.parameters.items():
            momentum, rate = delivered[name], self.rate(p)
            if self.alone:
                mean = self._mean(name, momentum)
                before = self.drifts.get(name) or Drift(local(p).detach().clone(), mean)
                kept = before.kept * (1 - self.group_of(p)["lr"] * self.group_of(p)["weight_decay"])
                self.drifts[name] = Drift(before.start, mean, before.moved + rate, kept)
            elif drift := self.drifts.pop(name, None):
                local(p).copy_(drift.start).mul_(drift.kept)
                rate += drift.moved
            self.advance(p, momentum, rate)
        self.local_steps = self.local_steps + 1 if self.alone else 0

    def restart(self) -> None:
        """Forget the drifts."""
        self.drifts, self.local_steps = {}, 0

    def round_state(self) -> dict[str, Any]:
        """Return the drifts, and the parameters and momenta that have drifted."""
        return {
            "local_steps": self.local_steps,
            "drifts": {name: drift._asdict() for name, drift in self.drifts.items()},
            "parameters": {name: self.shards[name].detach() for name in self.drifts},
            "momenta": {name: self.kept(self.parameters[name], "exp_avg") for name in self.drifts},
        }

    def check_round_state(self, part: Mapping[str, Any]) -> None:
        """Check names and shapes."""
        state.check_keys(part, {"local_steps", "drifts", "parameters", "momenta"}, "ZeroOneAdam")
        drifts = part["drifts"]
        drifted = self.shards if drifts else {}  # all of them, or none
        for key in ("start", "momentum"):
            state.check_tensors({name: drift[key] for name, drift in drifts.items()}, drifted, f"drifts ({key})")
        for key in ("parameters", "momenta"):
            state.check_tensors(part[key], drifted, key)

    def load_round_state(self, part: Mapping[str, Any]) -> None:
        """Copy the drifts, and the parameters and momenta that have drifted."""
        self.local_steps = part["local_steps"]
        self.drifts = {
            name: Drift(**{**drift, "start": drift["start"].clone(), "momentum": drift["momentum"].clone()})
            for name, drift in part["drifts"].items()
        }
        with torch.no_grad():
            for name in self.drifts:
                self.shards[name].copy_(part["parameters"][name])
                self.kept(self.parameters[name], "exp_avg").copy_(part["momenta"][name])

    def _mean(self, name: str, momentum: Tensor) -> Tensor:
        """Return the mean momentum since the last synchronisation, this step included, weighted by learning rates."""
        drift, rate = self.drifts.get(name), self.rate(self.parameters[name])
        if drift is None or drift.moved + rate == 0:
            return momentum
        return torch.lerp(drift.momentum, momentum, rate / (drift.moved + rate))


def update_steps(dense: int, end: int, kappa: int) -> set[int]:
    """Return the steps from ``dense`` to ``end`` that update the variance; ``kappa`` updates double the interval."""
    steps: set[int] = set()
    step = dense - 1
    while step < end:
        step += 2 ** (1 + len(steps) // kappa)
        steps.add(step)
    return {step for step in steps if step < end}
