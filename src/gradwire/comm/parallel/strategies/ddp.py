"""DistributedDataParallel: replicas, and an all-reduce of the gradients during the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from gradwire.base.errors import RunFault
from gradwire.comm.collectives import Reducer
from gradwire.comm.collectives.ops import Group
from gradwire.comm.parallel.buckets import BUCKET_MB, MB, BucketReduction, plan
from gradwire.comm.parallel.names import trainable, unwrapped
from gradwire.comm.parallel.strategy import Strategy

PARTS = 4  # buckets that DDP makes of one of ours, so that ours are complete early


class DDP(Strategy):
    """Replicated parameters; the reducer is DDP's communication hook.

    DDP's buckets change after the first step, and again after a resumption. So its gradients are reduced in buckets of
    our own (`comm.parallel.buckets`).

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
        wrapped.bucket_bytes_cap = max(wrapped.bucket_bytes_cap, dist._DEFAULT_FIRST_BUCKET_BYTES)
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
        buckets = HookedBuckets(reducer, parameters, self.bucket_mb, self.device, self.added)
        for name, parameter in parameters.items():  # called before DDP's own hook, which may reduce
            parameter.register_post_accumulate_grad_hook(partial(noted, self.added, name))
        owner = weakref.proxy(wrapped)  # DDP holds the hook, where the garbage collector does not see it

        # DDP requires the name of the second argument, and rejects string annotations, as these become.
        def reduce_bucket(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            if owner._join_config.enable:
                raise RunFault(
                    "DistributedDataParallel.join does not go with a reducer: ranks that have no inputs left take no "
                    "optimizer steps. Give all ranks equally many batches, or use gradwire.ddp_hook."
                )
            return buckets.take(bucket)

        reduce_bucket.__annotations__.clear()
        wrapped.register_comm_hook(None, reduce_bucket)

    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Use `no_sync` except for the last micro-batch."""
        assert isinstance(wrapped, DistributedDataParallel)
        return nullcontext() if last else wrapped.no_sync()


def noted(added: set[str], name: str, _: nn.Parameter) -> None:
    """Take notice that a backward pass has added to a gradient; autograd's hook of a parameter."""
    added.add(name)


@dataclass
class Taken:
    """A bucket of DDP's: its future is complete when none of its gradients is missing."""

    future: torch.futures.Future[Tensor]
    buffer: Tensor
    missing: int


class HookedBuckets:
    """Reduces DDP's gradients in our buckets.

    The end of the backward pass waits for them too, since a future of DDP's cannot say why a reduction failed.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: dict[str, nn.Parameter],
        bucket_mb: float,
        device: torch.device,
        added: set[str],
    ) -> None:
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.reduction = BucketReduction(reducer, plan(parameters, bucket_mb), self.release)
        self.devices = None if device.type == "cpu" else [device]
        self.added = added  # see `Strategy`
        self.taken: dict[str, Taken] = {}  # by the name of a gradient that is not averaged yet

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket of DDP's; the future completes with its buffer when all of its gradients are means.

        Raises:
            RunFault: On all ranks, if DDP reduces other parameters than when the reducer was attached. DDP waits for
                its futures without end, so none may be left over.
        """
        if bucket.index() == 0:
            self.reduction.settle()  # if an exception interrupted the previous pass
            self.taken.clear()
        names = [self.names.get(id(parameter), "") for parameter in bucket.parameters()]
        self.added.difference_update(names)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=self.devices)
        self.taken |= dict.fromkeys(names, Taken(future, bucket.buffer(), len(names)))
        if "" not in names:
            for name, gradient in zip(names, bucket.gradients(), strict=True):
                self.reduction.add(name, gradient)
        if "" in names or (bucket.is_last() and not self.reduction.complete):
            raise RunFault(
                "DDP does not reduce the parameters that it had when the reducer was attached: wrap the model again, "
                "and attach a reducer to it."
            )
        if bucket.is_last():  # in a nested pass, if activation checkpointing is reentrant
            Variable._execution_engine.queue_callback(self.reduction.settle)
        return future

    def release(self, names: Collection[str]) -> None:
        """Complete the futures of the buckets that miss no other gradient; only the reducer's queue calls this."""
        for name in names:
            taken = self.taken.pop(name)
            taken.missing -= 1
            if not taken.missing:
                taken.future.set_result(taken.buffer)
