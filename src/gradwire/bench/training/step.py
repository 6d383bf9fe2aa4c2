"""One optimizer step over its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradwire.bench.config import Training
from gradwire.bench.training.clock import Clock
from gradwire.bench.training.feed import Feed
from gradwire.bench.training.objective import Plain
from gradwire.bench.training.outcome import Row
from gradwire.bench.training.preemption import Preemption
from gradwire.comm import parallel
from gradwire.comm.collectives import Reducer, ops
from gradwire.comm.collectives.world import World
from gradwire.comm.parallel import optimizers
from gradwire.lm.data.batches import Batch


class Diverged(Exception):
    """The loss or a gradient is not finite. Ends the run; divergence is a result, not a failure."""


@dataclass
class Stepper:
    """Takes optimizer steps and measures them.

    Args:
        model: The wrapped model.
        optimizer: Its optimizer.
        reducer: Its reducer, or None.
        feed: This rank's micro-batches.
        objective: Defines the loss to differentiate.
        training: The training settings.
        world: The process group and this rank's position in it.
        clock: Times the phases.
        asked: The requests to stop, which the ranks agree on in each step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    reducer: Reducer | None
    feed: Feed
    objective: Plain
    training: Training
    world: World
    clock: Clock
    asked: Preemption

    def take(self, step: int) -> Row:
        """Run one optimizer step and return its measurements.

        The reported loss is the mean over the targets of all ranks and micro-batches: each rank's sum is divided by the
        global number of targets. One small all-reduce sums the loss, the next step's number of targets, the stop
        requests and, with a reducer, its flag.

        Raises:
            Diverged: If the loss or the gradient's norm is not finite.
            NonFiniteGradient: If the reducer found a non-finite gradient, with ``nonfinite: raise``.
        """
        self.clock.start()
        n_targets, tokens, micro_batches = self.feed.n_targets, self.feed.own_targets, self.feed.take()
        self.clock.lap("data_ms")
        total = self._backward(micro_batches, n_targets, step)
        stop = torch.full((), float(self.asked.requested), device=self.world.device)
        totals = torch.stack([total, self.feed.coming_targets(), stop, *self.objective.totals()])
        grad_norm, reduced = self._update(totals)
        self.clock.lap("optimizer_ms")
        loss, self.feed.n_targets, stops, *statistics = totals
        self.asked.agreed = bool(stops > 0)
        check_finite(float(loss), "the loss")
        self.clock.stop()
        return self.clock.times | {
            "t_start_s": self.clock.started_s,
            "tokens": tokens,
            "loss": float(loss) if n_targets else None,
            "passes": self.objective.passes * len(micro_batches),
            **self.objective.columns([float(value) for value in statistics]),
            "grad_norm": grad_norm,
            "clipped": grad_norm > self.training.clip_grad_norm,
            "nonfinite": not reduced,
            "val_loss": None,
            "residual_norm": None,
        }

    def _backward(self, micro_batches: Sequence[Batch], n_targets: Tensor, step: int) -> Tensor:
        """Accumulate the gradients and return this rank's share of the loss.

        The loss is multiplied by W, because the strategies average gradients over ranks.
        """
        total = torch.zeros((), device=self.world.device)
        self.objective.begin(self.model, micro_batches, step)
        self.clock.lap("forward_ms")
        for i, batch in enumerate(micro_batches):
            last = i + 1 == len(micro_batches)
            with parallel.accumulation(self.model, last):
                loss, reported = self.objective.loss(self.model, batch, n_targets, last)
                self.clock.lap("forward_ms")
                total += reported
                (loss * self.world.world_size).backward()
                self.clock.lap("backward_ms")
        return total

    def _update(self, totals: Tensor) -> tuple[float, bool]:
        """Finish the reduction, sum ``totals`` over ranks in place, and take the optimizer's step.

        Returns:
            The gradient's norm before clipping, and whether the step was taken.
        """
        if isinstance(self.optimizer, optimizers.Communicating):
            grad_norm, reduced = self.optimizer.communicate(self.training.clip_grad_norm, totals)
        else:
            if self.reducer is not None:
                reduced = self.reducer.finish(totals)
            else:
                reduced = True
                ops.all_reduce(totals, purpose="control")
            grad_norm = parallel.clip_grad_norm(self.model, self.training.clip_grad_norm)
        if reduced:
            check_finite(grad_norm, "the gradient's norm")
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm, reduced


def check_finite(value: float, what: str) -> None:
    """Raise `Diverged` if ``value``, which is equal on all ranks, is not finite."""
    if not math.isfinite(value):
        raise Diverged(f"{what} is {value}")
