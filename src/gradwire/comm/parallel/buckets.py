"""Buckets of gradients: cut from the model alone, and reduced in order, each as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import Reducer, ops
from gradwire.comm.collectives.queue import Handle

MB = 2**20
BUCKET_MB = 25.0  # DDP's default
FEWEST = 4  # buckets of a model, so that a small one overlaps too

Named = Mapping[str, nn.Parameter]


# Why: docs/decisions.md, "Buckets of our own".
def plan(parameters: Named, bucket_mb: float = BUCKET_MB, fewest: int = FEWEST) -> list[dict[str, nn.Parameter]]:
    """Assign parameters to buckets in reverse order, which approximates the order of their gradients.

    A bucket is closed when it reaches its size: ``bucket_mb``, or an equal part of what is left if that makes
    ``fewest`` buckets. Dtypes and devices have separate buckets.

    Args:
        parameters: The trainable parameters by name, in the model's order.
        bucket_mb: Size of a bucket in MiB; 0 makes one bucket per parameter.
        fewest: Buckets of each dtype and device, if it has as many parameters.

    Returns:
        The buckets in the order of their reduction: that of their last parameters.
    """
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in reversed([*parameters.items()]):
        kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
    buckets = [bucket for kind in kinds.values() for bucket in cut(kind, MB * bucket_mb, fewest)]
    position = {name: -index for index, name in enumerate(parameters)}
    return sorted(buckets, key=lambda bucket: max(position[name] for name in bucket))


def cut(parameters: Named, size: float, fewest: int) -> Iterator[dict[str, nn.Parameter]]:
    """Cut parameters into consecutive buckets of ``size`` bytes, or smaller ones so that there are ``fewest``."""
    bytes_left, left, missing = sum(map(ops.nbytes, parameters.values())), len(parameters), fewest
    bucket: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        bucket[name], left = parameter, left - 1
        filled = sum(map(ops.nbytes, bucket.values()))
        if not left or filled >= min(size, bytes_left / max(1, missing)) or left < missing:
            yield bucket
            bucket, bytes_left, missing = {}, bytes_left - filled, missing - 1


class Launcher:
    """Launches buckets in order, each as soon as all of its parameters are ready, so all ranks have the same order.

    Args:
        buckets: The names in each bucket.
        launch: Called with the index of a bucket.
    """

    def __init__(self, buckets: Sequence[Collection[str]], launch: Callable[[int], None]) -> None:
        self.buckets = buckets
        self.launch = launch
        self.bucket_of = {name: index for index, bucket in enumerate(buckets) for name in bucket}
        self.reset()

    def reset(self) -> None:
        """Start over: nothing is ready."""
        self.missing = [set(bucket) for bucket in self.buckets]
        self.launched = 0

    def ready(self, name: str) -> None:
        """Launch the buckets that this parameter completes."""
        self.missing[self.bucket_of[name]].discard(name)
        while self.launched < len(self.buckets) and not self.missing[self.launched]:
            self.launched += 1
            self.launch(self.launched - 1)


class BucketReduction:
    """Averages gradients through a reducer, bucket by bucket, while the backward pass goes on.

    Args:
        reducer: Averages over the ranks.
        buckets: The parameters of each bucket by name, from `plan`.
        reduced: Called with the names of a bucket, in the reducer's queue, when its gradients are means, or when its
            reduction has failed.
    """

    def __init__(
        self,
        reducer: Reducer,
        buckets: Sequence[Named],
        reduced: Callable[[Collection[str]], object] = lambda names: None,
    ) -> None:
        self.reducer = reducer
        self.reduced = reduced
        shapes = [[(name, tuple(p.shape)) for name, p in bucket.items()] for bucket in buckets]
        self.layouts = [reducer.layout(bucket) for bucket in shapes]
        self.launcher = Launcher(buckets, self._begin)
        self.gradients: dict[str, Tensor] = {}
        self.handles: list[Handle] = []

    def add(self, name: str, gradient: Tensor) -> None:
        """Take a contiguous gradient, which becomes the mean in place; not to be used before `settle`."""
        self.gradients[name] = gradient
        self.launcher.ready(name)

    @property
    def complete(self) -> bool:
        """Whether all gradients were added."""
        return self.launcher.launched == len(self.launcher.buckets)

    def settle(self) -> None:
        """Wait until all gradients that were added are means, and start over.

        Raises:
            Exception: That of a reduction.
        """
        handles, self.handles, self.gradients = self.handles, [], {}
        self.launcher.reset()
        for handle in handles:
            handle.wait()

    def _begin(self, index: int) -> None:
        names, layout = self.launcher.buckets[index], self.layouts[index]
        gradients = {name: self.gradients[name] for name in names}

        def unpack(mean: Tensor) -> None:
            layout.unpack(mean, gradients)
            self.reduced(names)

        handle = self.reducer.begin_all_reduce(layout.pack(gradients), layout, unpack)
        handle.if_failed(lambda _: self.reduced(names))
        self.handles.append(handle)
