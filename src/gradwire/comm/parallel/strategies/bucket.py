"""Bucketed data parallelism: gradients are reduced in buckets that overlap with the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradwire.comm.collectives import Reducer, ops
from gradwire.comm.parallel.buckets import BUCKET_MB, BucketReduction, Launcher, Named, plan
from gradwire.comm.parallel.strategies.naive import Replicas, divided


class Bucket:
    """Parameters of one dtype and device, by name, whose gradients are views of one buffer."""

    def __init__(self, parameters: Named) -> None:
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.buffer = next(iter(parameters.values())).detach().new_zeros(sum(sizes))
        slices = zip(parameters, self.buffer.split(sizes), strict=True)
        self.views = {name: values.view(parameters[name].shape) for name, values in slices}
        self.pending: ops.Pending | None = None  # the buffer's all-reduce, while it runs

    def keep(self, name: str) -> None:
        """Copy a gradient into the buffer, unless it is a view of it; `zero_grad` replaces views by None."""
        parameter, view = self.parameters[name], self.views[name]
        assert parameter.grad is not None
        if parameter.grad is not view:
            parameter.grad = view.copy_(parameter.grad)

    def start(self, world: int, group: ops.Group) -> None:
        """Start averaging the buffer."""
        self.pending = ops.begin_all_reduce(divided(self.buffer, world), "sum", group, "payload")

    def settle(self) -> None:
        """Wait for the all-reduce."""
        if self.pending is not None:
            self.buffer.copy_(self.pending.wait())
        self.pending = None


class BucketManager(Replicas):
    """One asynchronous all-reduce per bucket; the end of the backward pass waits for them.

    Args:
        group: The ranks; None is the default group.
        device: The model's device.
        bucket_mb: Size of a bucket in MiB; 0 makes one bucket per parameter.
    """

    name = "bucket"

    def __init__(self, group: ops.Group, device: torch.device, *, bucket_mb: float = BUCKET_MB) -> None:
        super().__init__(group, device)
        self.bucket_mb = bucket_mb
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[str, Bucket] = {}
        self.launcher = Launcher((), self.start)
        self.reduction: BucketReduction | None = None

    def adopt(self, parameters: dict[str, nn.Parameter]) -> None:
        """Average the gradients of these parameters from now on, in new buckets."""
        super().adopt(parameters)
        buckets = plan(parameters, self.bucket_mb)
        self.buckets = list(map(Bucket, buckets))
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.parameters}
        self.launcher = Launcher(buckets, self.start)
        self.reduction = None if self.reducer is None else BucketReduction(self.reducer, buckets)

    def changed_parameters(self, parameters: dict[str, nn.Parameter]) -> bool:
        """Whether others, or other types of them, must be adopted."""
        return super().changed_parameters(parameters) or any(
            self.bucket_of[name].buffer.dtype != parameter.dtype for name, parameter in parameters.items()
        )

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Average with the reducer from now on."""
        super().hook(wrapped, reducer)
        self.reduction = BucketReduction(reducer, [bucket.parameters for bucket in self.buckets])

    def keep(self, name: str) -> None:
        """Copy a gradient into its bucket."""
        self.bucket_of[name].keep(name)

    def ready(self, name: str) -> None:
        """Launch the buckets that this gradient completes."""
        if self.reduction is None:
            self.launcher.ready(name)
        else:
            self.reduction.add(name, self.bucket_of[name].views[name])

    def start(self, index: int) -> None:
        """Start the all-reduce of a bucket."""
        self.buckets[index].start(self.world, self.group)

    def settle(self) -> None:
        """Wait for the launched buckets, and reset."""
        if self.reduction is not None:
            self.reduction.settle()
        for bucket in self.buckets:
            bucket.settle()
        self.launcher.reset()

    def table(self) -> list[dict[str, Any]]:
        """Return the contents of each bucket, in launch order."""
        return [
            {"names": list(b.parameters), "dtype": b.buffer.dtype, "numel": b.buffer.numel(), "bytes": b.buffer.nbytes}
            for b in self.buckets
        ]
