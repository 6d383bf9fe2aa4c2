"""DES-LOC: local Adam whose parameters and moments the ranks average, each at its own interval.

Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models"
(arXiv:2505.22549, 2025, Algorithm 1). The slower a moment decays, the less often it is averaged. Parameters travel as
in `diloco`, through the cell's compressor and error feedback; moments as float32, because Adam divides by one of them:
the error of a small variance, or of a momentum over one, is a huge step.

The paper averages a moment at the beginning of a step, here it is averaged at the end of the step before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from gradwire.base.errors import BadInput
from gradwire.base.strict import checked_arguments
from gradwire.comm.communication import Interval, Outer
from gradwire.comm.parallel.mesh import local
from gradwire.comm.parallel.optimizers.base import LOCAL_STEP, Communicating
from gradwire.comm.parallel.optimizers.diloco import DiLoCo, Rounds
from gradwire.comm.parallel.optimizers.muon import Muon

MEAN = Outer(lr=1.0, momentum=0.0)


class DesLoc(DiLoCo):
    """DES-LOC; see the module for the algorithm.

    Args:
        optimizer: An Adam or AdamW of torch.
        model: As for `diloco.DiLoCo`.
        sync_every: Steps between two averages of the parameters, or a schedule.
        sync_momentum: Steps between two averages of the first moment; default: 3 times ``sync_every``.
        sync_variance: Steps between two averages of the second moment; default: 6 times ``sync_every``.
        outer: As for `diloco.DiLoCo`; by default the parameters become the mean of the ranks'.
        options: Other options of `diloco.DiLoCo`.

    Raises:
        BadInput: If the optimizer has other moments, or as the base class.
    """

    regroups = False  # moments are averaged between rounds too

    @checked_arguments
    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        sync_every: Interval,
        sync_momentum: Interval | None = None,
        sync_variance: Interval | None = None,
        outer: Outer | Mapping[str, Any] = MEAN,
        **options: Any,
    ) -> None:
        if not isinstance(optimizer, Adam | AdamW) or isinstance(optimizer, Muon | Communicating):
            raise BadInput(f"DesLoc averages the moments of Adam or AdamW, not those of {type(optimizer).__name__}.")
        self.intervals = {  # by the key of torch's state
            "exp_avg": Rounds(multiple(sync_every, 3) if sync_momentum is None else sync_momentum),
            "exp_avg_sq": Rounds(multiple(sync_every, 6) if sync_variance is None else sync_variance),
        }
        super().__init__(optimizer, model, sync_every=sync_every, outer=outer, **options)
        self.received: dict[str, dict[str, Tensor]] = {}  # mean moments by key and name, from `average` to `move`

    def kind(self, step: int) -> str:
        """The parts that a step averages."""
        averaged = {"parameters": self.rounds, **self.intervals}
        return ", ".join(name for name, rounds in averaged.items() if rounds.ends(step)) or LOCAL_STEP

    def due(self, step: int) -> bool:
        """Whether a step averages the parameters or a moment."""
        return super().due(step) or any(rounds.ends(step) for rounds in self.intervals.values())

    def send(self) -> None:
        """Average what is due."""
        step = self.reducer.step
        if self.rounds.ends(step):
            super().send()
        else:
            self.reducer.skip(self.layout)
        for key, rounds in self.intervals.items():
            if rounds.ends(step):
                self.received[key] = self._mean(key)

    def advance(self) -> None:
        """Take the outer step, and continue with the mean moments."""
        super().advance()
        for key, means in self.received.items():
            for name, mean in means.items():
                self._moment(key, name).copy_(mean)
        self.received = {}

    def discard(self) -> None:
        """Drop what was received, and return the parameters to their anchors."""
        super().discard()
        self.received = {}

    def load_round_state(self, saved: Mapping[str, Any]) -> None:
        """As `DiLoCo.load_round_state`."""
        super().load_round_state(saved)
        self.received = {}

    def _moment(self, key: str, name: str) -> Tensor:
        """This rank's moment of a parameter."""
        return local(self.inner.state[self.parameters[name]][key])

    def _mean(self, key: str) -> dict[str, Tensor]:
        """Average a moment of all parameters over the ranks, as float32."""
        moments = {name: self._moment(key, name) for name in self.trained}
        with self.reducer.plain():
            mean = self.reducer.begin_all_reduce(self.layout.pack(moments), self.layout, extra=True).wait()
        means = {name: torch.empty_like(moment) for name, moment in moments.items()}
        self.layout.unpack(mean, means)
        return means


def multiple(interval: Interval, factor: int) -> Interval:
    """Return an interval, or each one of a schedule, times a factor."""
    if isinstance(interval, Mapping):
        return {step: factor * length for step, length in interval.items()}
    return factor * interval
