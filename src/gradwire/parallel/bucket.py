"""Bucketed data parallelism: gradients are reduced in buckets that overlap with the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gradwire.collectives import ops
from gradwire.parallel.naive import Replicas, divided

MB = 2**20


class Bucket:
    """Parameters of one dtype and device, by name, whose gradients are views of one buffer."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.buffer = next(iter(parameters.values())).detach().new_zeros(sum(sizes))
        parts = zip(parameters, self.buffer.split(sizes), strict=True)
        self.views = {name: part.view(parameters[name].shape) for name, part in parts}
        self.ready: set[str] = set()  # parameters whose gradient is ready for averaging
        self.pending: ops.Pending | None = None  # the buffer's all-reduce, while it runs

    def keep(self, name: str) -> None:
        """Copy a gradient into the buffer, unless it is a view of it; `zero_grad` replaces views by None."""
        parameter, view = self.parameters[name], self.views[name]
        assert parameter.grad is not None
        if parameter.grad is not view:
            parameter.grad = view.copy_(parameter.grad)

    def start(self, world: int, group: ops.Group) -> None:
        """Start averaging the buffer."""
        self.pending = ops.all_reduce_async(divided(self.buffer, world), "sum", group, "payload")

    def settle(self) -> None:
        """Wait for the all-reduce, and clear ``ready``."""
        if self.pending is not None:
            self.buffer.copy_(self.pending.wait())
        self.pending = None
        self.ready.clear()


class BucketManager(Replicas):
    """One asynchronous all-reduce per bucket; the end of the backward pass waits for them.

    A compressor's exchange runs when its bucket is launched, and blocks the backward pass.

    Args:
        group: The ranks; None is the default group.
        device: The model's device.
        first_mb: Size of the first bucket in MiB; small, so that communication starts early.
        cap_mb: Size of the other buckets in MiB; 0 makes one bucket per parameter.
    """

    def __init__(self, group: ops.Group, device: torch.device, *, first_mb: float = 1.0, cap_mb: float = 25.0) -> None:
        super().__init__(group, device)
        self.sizes = first_mb, cap_mb
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[str, Bucket] = {}
        self.launched = 0  # number of launched buckets, in order

    def wrap(self, model: nn.Module) -> nn.Module:
        """Broadcast rank 0's weights, register the gradient hooks, and plan the buckets."""
        model = super().wrap(model)
        self.buckets = list(map(Bucket, plan(self.parameters, *self.sizes)))
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.parameters}
        return model

    def keep(self, name: str) -> None:
        """Copy a gradient into its bucket."""
        self.bucket_of[name].keep(name)

    def ready(self, name: str) -> None:
        """Launch the buckets that this gradient completes, always in order, so that it is the same on every rank."""
        self.bucket_of[name].ready.add(name)
        for bucket in self.buckets[self.launched :]:
            if len(bucket.ready) < len(bucket.parameters):
                return
            self.launched += 1
            if self.reducer is None:
                bucket.start(self.world, self.group)
            else:
                self.through_reducer(bucket.views)

    def settle(self) -> None:
        """Wait for the launched buckets, and reset."""
        for bucket in self.buckets:
            bucket.settle()
        self.launched = 0

    def table(self) -> list[dict[str, Any]]:
        """Return the contents of each bucket, in launch order."""
        return [
            {"names": list(b.parameters), "dtype": b.buffer.dtype, "numel": b.buffer.numel(), "bytes": b.buffer.nbytes}
            for b in self.buckets
        ]


def plan(parameters: dict[str, nn.Parameter], first_mb: float, cap_mb: float) -> list[dict[str, nn.Parameter]]:
    """Assign parameters to buckets in reverse order, which approximates the order of their gradients.

    A bucket is closed when it reaches its size; dtypes and devices have separate buckets. The order of the buckets,
    and of their launch, is that of their last parameters.
    """
    full: list[dict[str, nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in reversed(parameters.items()):
        kind = parameter.dtype, parameter.device
        filling.setdefault(kind, {})[name] = parameter
        if sum(map(ops.nbytes, filling[kind].values())) >= MB * (cap_mb if full else first_mb):
            full.append(filling.pop(kind))
    position = {name: -index for index, name in enumerate(parameters)}
    return sorted([*full, *filling.values()], key=lambda bucket: max(position[name] for name in bucket))
