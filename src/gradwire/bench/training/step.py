"""One optimizer step over its micro-batches, which all ranks agree to take, or to stop after."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.base.prefetch import prefetch
from gradwire.bench.config import Training
from gradwire.bench.training.measure import Clock, Row
from gradwire.bench.training.objective import Plain
from gradwire.bench.training.settings import Settings
from gradwire.comm import parallel
from gradwire.comm.collectives import Reducer, ops
from gradwire.comm.collectives.world import World
from gradwire.comm.parallel import optimizers
from gradwire.lm.data.batches import Batch, grouped, poisson_steps, train_batches
from gradwire.lm.data.shards import Shards


def micro_batches(settings: Settings, split: Shards, world: World, start: int) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each optimizer step from ``start`` on, indefinitely."""
    training, place = settings.training, (world.rank, world.world_size, settings.seed)
    per_step = training.grad_accum_steps
    if training.private and training.dp_sampling == "poisson":
        expected = training.batch_size * per_step * world.world_size
        return poisson_steps(split, training.batch_size, expected, *place, start=start)
    return grouped(train_batches(split, training.batch_size, *place, start=start * per_step), per_step)


class Feed:
    """Prefetches the next step's micro-batches; their target count is reduced together with the current step's loss.

    For a GPU they wait in pinned memory, so that nothing here waits for the device.

    Args:
        steps: Endless iterator of this rank's micro-batches, one list per step.
        device: The device to move them to.
    """

    def __init__(self, steps: Iterator[list[Batch]], device: torch.device) -> None:
        if device.type == "cuda":
            steps = (pinned(batches, device) for batches in steps)
        self._steps, self._device = prefetch(steps), device
        self._coming = next(self._steps)
        self.n_targets = ops.all_reduce(self.coming_targets(), purpose="control")  # of all ranks in the next step

    def take(self) -> list[Batch]:
        """Return the current step's micro-batches on the device, and read the next step's."""
        taken, self._coming = self._coming, next(self._steps)
        return [batch.to(self._device) for batch in taken]

    @property
    def own_targets(self) -> int:
        """This rank's number of targets in the next step."""
        return sum(batch.n_targets for batch in self._coming)

    def coming_targets(self) -> Tensor:
        """The same on the device."""
        return torch.full((), float(self.own_targets), device=self._device)


def pinned(batches: list[Batch], device: torch.device) -> list[Batch]:
    """Copies of the batches in pinned memory; in any thread, the context is that of ``device``."""
    with torch.cuda.device(device):
        return [batch.pinned() for batch in batches]


SIGNALS = (signal.SIGTERM, signal.SIGINT)  # from a scheduler, and Ctrl-C


class Preemption:
    """Stop request: ``requested`` on this rank, ``agreed`` once all ranks know of a request."""

    def __init__(self) -> None:
        self.requested = False
        self.agreed = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; a second Ctrl-C raises KeyboardInterrupt at once."""
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def preemption() -> Iterator[Preemption]:
    """Record termination signals instead of exiting on them; main thread only.

    After a signal the handlers stay installed, because the process is about to exit.
    """
    asked = Preemption()
    before = {number: signal.signal(number, asked.note) for number in SIGNALS}
    try:
        yield asked
    finally:
        if not asked.requested:
            for number, handler in before.items():
                signal.signal(number, handler)


def set_learning_rate(optimizer: torch.optim.Optimizer, training: Training, step: int) -> float:
    """Set and return the learning rate of ``step``, a function of the step only, so resuming needs no state."""
    lr = learning_rate(training, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def learning_rate(training: Training, step: int) -> float:
    """Linear warm-up to ``lr``, then cosine decay to a tenth of it."""
    if step < training.lr_warmup_steps:
        return training.lr * (step + 1) / training.lr_warmup_steps
    done = (step - training.lr_warmup_steps) / max(1, training.steps - training.lr_warmup_steps)
    return training.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


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
                (loss * dist.get_world_size()).backward()
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
