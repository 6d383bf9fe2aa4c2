"""This rank's micro-batches, step by step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.bench.training.settings import Settings
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.world import World
from gradwire.lm.data.batches import Batch, grouped, poisson_steps, prefetch, train_batches
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
