"""DistributedDataParallel: replicas, and an all-reduce of the gradients during the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.base.errors import RunFault
from gradwire.comm.collectives import Reducer
from gradwire.comm.collectives.ops import Group
from gradwire.comm.parallel.attached import Attached
from gradwire.comm.parallel.buckets import BUCKET_MB, MB, plan
from gradwire.comm.parallel.comm_hook import HookedBuckets, PlannedBuckets, hooked_buckets, reduce_bucket
from gradwire.comm.parallel.names import trainable, unwrapped
from gradwire.comm.parallel.strategy import Strategy
from gradwire.comm.torch_internals import FIRST_BUCKET_BYTES, join_runs

Note: TypeAlias = Callable[[DistributedDataParallel, Reducer, set[str]], None]
PARTS = 4  # buckets that DDP makes of one of ours, so that ours are complete early


class DDP(Strategy):
    """Replicated parameters; the reducer is DDP's communication hook.

    Gradients of a model that this strategy wrapped are reduced in buckets that are cut from the model alone
    (`comm.parallel.comm_hook.PlannedBuckets`).

    Args:
        group: The ranks; None is the default group.
        device: The model's device.
        bucket_mb: Size of a bucket in MiB; 0 makes one bucket per parameter.
        find_unused_parameters: As for `DistributedDataParallel`: parameters that a forward pass leaves unused get the
            mean of the other ranks' gradients.
        static_graph: As for `DistributedDataParallel`.
    """

    name = "ddp"
    kind = "all_reduce"
    alone = True

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        bucket_mb: float = BUCKET_MB,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__(group, device)
        self.bucket_mb = bucket_mb
        self.framework = {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
        self._unused: set[str] = set()  # parameters that zeros were reduced for in this optimizer step

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the whole model; with a reducer DDP's own buckets are small."""
        devices = None if self.device.type == "cpu" else [self.device]
        size = None
        if self.reduced:
            buckets = plan(trainable(model), self.bucket_mb)
            sizes = [sum(p.nbytes for p in bucket.values()) for bucket in buckets]
            size = max(sizes, default=MB) / PARTS / MB
        wrapped = DistributedDataParallel(
            model, device_ids=devices, process_group=self.group, bucket_cap_mb=size, **self.framework
        )
        # torch.compile splits graphs by this size alone, and asserts that it is not below that of DDP's first bucket.
        wrapped.bucket_bytes_cap = max(wrapped.bucket_bytes_cap, FIRST_BUCKET_BYTES)
        return wrapped

    def averaged(self, wrapped: nn.Module) -> dict[str, nn.Parameter]:
        """Return DDP's own parameters: without those that it is set to ignore, or reduces later itself."""
        assert isinstance(wrapped, DistributedDataParallel)
        ignored = wrapped.parameters_to_ignore
        held = {name: p for name, p in wrapped.module.named_parameters() if p.requires_grad}
        # DDP looks up a parameter of the root with a dot before its name, so it ignores none of them
        return {unwrapped(name): p for name, p in held.items() if "." not in name or name not in ignored}

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Register a hook that hands the gradients to the reducer."""
        assert isinstance(wrapped, DistributedDataParallel)
        parameters = self.averaged(wrapped)
        names = {id(parameter): name for name, parameter in parameters.items()}
        buckets = (
            PlannedBuckets(reducer, names, parameters, self.bucket_mb)
            if self.reduced
            else hooked_buckets(reducer, names, [tuple(p.shape) for p in parameters.values()], parameters)
        )
        for name, parameter in parameters.items():  # called before DDP's own hook, which may reduce
            parameter.register_post_accumulate_grad_hook(partial(noted, self.added, name))
        wrapped.register_comm_hook(HookState(wrapped, buckets, self.note_reduced), reduce_bucket)

    def note_reduced(self, wrapped: DistributedDataParallel, reducer: Reducer, names: set[str]) -> None:
        """Record that gradients are reduced, and which of them DDP fills with zeros as no backward pass added any."""
        if wrapped.find_unused_parameters or wrapped.static_graph:
            self._unused |= names - self.added
            reducer.codec.hold(names - self.added)
        self.added -= names

    def left_out(self, wrapped: nn.Module) -> set[str]:
        """Return the parameters that DDP has left without a gradient, as all ranks left them out; begin a step."""
        unused, self._unused = self._unused, set()
        return {name for name, p in self.averaged(wrapped).items() if name in unused and p.grad is None}

    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Use `no_sync` except for the last micro-batch."""
        assert isinstance(wrapped, DistributedDataParallel)
        return nullcontext() if last else wrapped.no_sync()


class HookState(Attached):
    """The state of the hook.

    Args:
        wrapped: The model.
        buckets: Reduces its buckets.
        note: Called with the model, the reducer and the names of a bucket's parameters before it is reduced.
    """

    def __init__(self, wrapped: DistributedDataParallel, buckets: HookedBuckets, note: Note) -> None:
        self.wrapped = weakref.proxy(wrapped)  # DDP holds the state, where the garbage collector does not see it
        self.buckets, self.note = buckets, note

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket of DDP; as `HookedBuckets.take`.

        Raises:
            RunFault: Also in `DistributedDataParallel.join`.
        """
        if join_runs(self.wrapped):
            raise RunFault(
                "DistributedDataParallel.join does not go with gradients that are averaged once per optimizer "
                "step: ranks that have no inputs left take none. Give all ranks equally many batches, or use "
                "gradwire.comm_hook."
            )
        names = self.buckets.names
        reduced = {names.get(id(parameter), "") for parameter in bucket.parameters()}
        self.note(self.wrapped, self.buckets.reducer, reduced)
        return self.buckets.take(bucket)


def noted(added: set[str], name: str, _: nn.Parameter) -> None:
    """Record that a backward pass has added to a gradient; a hook of a parameter."""
    added.add(name)
