"""0/1 Adam: the variance is updated ever more rarely, and then the ranks go ever more steps without each other.

Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam" (ICLR 2023, Algorithm 1). Between
two synchronisations each rank takes Adam's steps by its own momentum. Then they average, through the compressor, what
they have moved by; they start together from where they last were equal, and the momentum becomes the mean one of the
steps in between.

What differs from the paper: steps that update the variance average gradients as float32, so their momentum is the exact
mean and needs no second message. And what travels is the mean momentum (the paper's u divided by the sum of learning
rates), so that residuals keep their unit when rates or intervals change; with an interval of 1 this is 1-bit Adam.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradwire.collectives import Reducer
from gradwire.errors import BadInput
from gradwire.parallel.optimizers.base import CommunicatingAdam


class Drift(NamedTuple):
    """What a parameter has done since the last synchronisation.

    Attributes:
        start: The parameter then.
        momentum: Mean momentum since, weighted by the learning rates.
        moved: Sum of these rates, each corrected for the momentum's start from zero.
        kept: What weight decay has left of ``start``.
    """

    start: Tensor
    momentum: Tensor
    moved: float = 0.0
    kept: float = 1.0


class ZeroOneAdam(CommunicatingAdam):
    """See the module.

    Args:
        model: As `base.CommunicatingAdam`.
        groups: Likewise.
        reducer: Likewise; its first ``dense_steps`` update the variance every time.
        freeze_step: Until here the variance is updated, after the dense steps at intervals of 2, 4, 8, ... steps; by
            default twice the dense steps.
        variance_kappa: Updates before that interval doubles.
        local_doubling: Steps after the freeze before the ranks synchronise every 2nd step only, and again before each
            further doubling; by default as many as before the freeze.
        max_local_steps: Largest interval between synchronisations.
        steps: Of the whole run; the last one synchronises. None if nobody knows.
        options: The base's.

    Raises:
        BadInput: If an option is out of range; as the base.
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
        dense = reducer.codec.dense_steps
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
                raise BadInput(f"{name} is {value}: it must be at least 1.")
        if self.freeze_step < dense:
            raise BadInput(f"freeze_step is {freeze_step}: the {dense} dense steps come first.")
        self.updates = update_steps(dense, self.freeze_step, variance_kappa)
        self.drifts: dict[str, Drift] = {}  # by parameter; empty while the ranks are in step
        self.local_steps = 0  # since the last synchronisation
        self.alone = False  # whether the present step sends nothing; from `exchange` to `step`

    @property
    def averages_gradients(self) -> bool:
        """While warming up, and where the variance is updated."""
        return super().averages_gradients or self.reducer.step in self.updates

    @property
    def in_step(self) -> bool:
        """Whether the last step synchronised the ranks."""
        return not self.drifts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As the base; after the warm-up a mean gradient updates the variance first, then the momentum moves on."""
        if self.delivered is not None or self.reducer.step <= self.reducer.codec.dense_steps:
            super().step()
            return
        for p in self.trained.values():
            beta1, beta2 = self.group_of(p)["betas"]
            state, gradient = self.state[p], p.grad
            assert gradient is not None
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            state["variance_steps"] += 1
            self.advance(p, torch.lerp(state["exp_avg"], gradient, 1 - beta1), self.rate(p))

    def exchange_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Average the mean momenta since the last synchronisation, if it is time; else nothing travels."""
        step = self.reducer.step
        interval = min(2 ** (max(0, step - self.freeze_step) // self.local_doubling), self.max_local_steps)
        self.alone = self.local_steps + 1 < interval and step != self.last_step
        if self.alone:
            self.reducer.skip(self.layout)
            self.delivered = dict(momenta)
        else:
            self.delivered = self.average({name: self._mean(name, momentum) for name, momentum in momenta.items()})

    def apply(self, delivered: Mapping[str, Tensor]) -> None:
        """Move on alone; or go back to the common start, and from there by the common mean."""
        for name, p in self.trained.items():
            momentum, rate = delivered[name], self.rate(p)
            if self.alone:
                mean = self._mean(name, momentum)
                before = self.drifts.get(name) or Drift(p.detach().clone(), mean)
                kept = before.kept * (1 - self.group_of(p)["lr"] * self.group_of(p)["weight_decay"])
                self.drifts[name] = Drift(before.start, mean, before.moved + rate, kept)
            elif drift := self.drifts.pop(name, None):
                p.copy_(drift.start).mul_(drift.kept)
                rate += drift.moved
            self.advance(p, momentum, rate)
        self.local_steps = self.local_steps + 1 if self.alone else 0

    def rank_state(self) -> dict[str, Any]:
        """Between two synchronisations: the drift, and the parameters and momenta that it has led to."""
        return {
            "local_steps": self.local_steps,
            "drifts": {name: drift._asdict() for name, drift in self.drifts.items()},
            "parameters": {name: self.trained[name].detach() for name in self.drifts},
            "momenta": {name: self.state[self.trained[name]]["exp_avg"] for name in self.drifts},
        }

    @torch.no_grad()
    def load_rank_state(self, state: dict[str, Any]) -> None:
        """See `Communicating`."""
        self.local_steps = state["local_steps"]
        self.drifts = {name: Drift(**drift) for name, drift in state["drifts"].items()}
        for name in self.drifts:
            self.trained[name].copy_(state["parameters"][name])
            self.state[self.trained[name]]["exp_avg"].copy_(state["momenta"][name])

    def _mean(self, name: str, momentum: Tensor) -> Tensor:
        """The mean momentum since the last synchronisation with another step's added, weighted by learning rates."""
        drift, rate = self.drifts.get(name), self.rate(self.trained[name])
        if drift is None or drift.moved + rate == 0:
            return momentum
        return torch.lerp(drift.momentum, momentum, rate / (drift.moved + rate))


def update_steps(dense: int, end: int, kappa: int) -> set[int]:
    """The steps from ``dense`` to ``end`` that update the variance; after every ``kappa`` their interval doubles."""
    steps: set[int] = set()
    step = dense - 1
    while step < end:
        step += 2 ** (1 + len(steps) // kappa)
        steps.add(step)
    return {step for step in steps if step < end}
