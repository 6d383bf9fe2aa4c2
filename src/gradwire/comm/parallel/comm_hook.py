"""A communication hook for DDP in torch's own protocol: a state and a function. Reductions overlap with backward.

It fits `DistributedDataParallel.register_comm_hook(state, hook)` (PyTorch, "DDP Communication Hooks"), Lightning's
``DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook)``, and a model that Accelerate has prepared.
"""

# No `annotations` import: DDP rejects annotations of its hook's arguments that are strings.
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from pydantic import InstanceOf
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from gradwire.base.errors import BadInput, RunFault
from gradwire.base.strict import checked_arguments
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.queue import Handle
from gradwire.comm.collectives.reducer import check_options
from gradwire.comm.compressors import as_compressor
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.parallel.attached import Attached
from gradwire.comm.parallel.buckets import BUCKET_MB, FEWEST, BucketReduction, plan
from gradwire.comm.parallel.checks import (
    check_agreement,
    check_gradients,
    check_has_values,
    check_unprepared,
    parameters_of,
)
from gradwire.comm.parallel.names import trainable
from gradwire.comm.parallel.strategy import EndOfBackward

Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]  # of parameters, by name


# Why: docs/decisions.md, "DDP's own buckets, where the result does not depend on them".
class HookedBuckets:
    """Reduces the buckets of DDP as they are.

    The end of the backward pass waits for the reductions, since a future of DDP cannot say why one failed.

    Args:
        reducer: Averages over the ranks.
        names: Names of the model's parameters, by their ``id``.
        ended: Called at the end of each backward pass, when all gradients are means.
    """

    def __init__(self, reducer: Reducer, names: Mapping[int, str], ended: Callable[[], object] = lambda: None) -> None:
        self.reducer = reducer
        self.names = names
        self.ended = ended
        self.end = EndOfBackward(self._end)
        self.layouts: dict[int, tuple[Shapes, Layout]] = {}  # of the present buckets, by index
        self.handles: list[Handle] = []

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket of DDP; the future completes with its buffer when all of its gradients are means.

        Raises:
            RunFault: On all ranks, if DDP reduces other parameters than when they were hooked. DDP waits for its
                futures without end, so none may be left over.
        """
        if bucket.index() == 0:
            self._settle()  # what is left of a pass that an exception interrupted
        device = bucket.buffer().device
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=None if device.type == "cpu" else [device])
        parameters = {self.names.get(id(parameter), ""): parameter for parameter in bucket.parameters()}
        if "" not in parameters:
            self._add(bucket, parameters, future)
        if "" in parameters or (bucket.is_last() and not self._complete()):
            raise RunFault(
                "DDP does not reduce the parameters that it had when the gradients were hooked: was one unfrozen or "
                "replaced since? Wrap the model again, and hook it again."
            )
        if bucket.is_last() and not self.end.expect():  # a rank in DistributedDataParallel.join has no backward pass
            self._end()
        return future

    def _add(
        self, bucket: dist.GradBucket, parameters: dict[str, nn.Parameter], future: torch.futures.Future[Tensor]
    ) -> None:
        """Begin to reduce a bucket."""
        gradients = dict(zip(parameters, bucket.gradients(), strict=True))
        shapes = tuple((name, tuple(gradient.shape)) for name, gradient in gradients.items())
        if self.layouts.get(bucket.index(), (None, None))[0] != shapes:
            self.layouts[bucket.index()] = shapes, self.reducer.layout(shapes)
        layout, buffer = self.layouts[bucket.index()][1], bucket.buffer()

        def deliver(mean: Tensor) -> None:
            layout.unpack(mean, gradients)
            future.set_result(buffer)

        handle = self.reducer.begin_all_reduce(layout.pack(gradients), layout, deliver)
        handle.if_failed(lambda _: future.set_result(buffer))
        self.handles.append(handle)

    def _complete(self) -> bool:
        """Whether the reduction of every bucket that was taken has begun."""
        return True

    def _settle(self) -> None:
        """Wait until all gradients are means."""
        handles, self.handles = self.handles, []
        for handle in handles:
            handle.wait()

    def _end(self) -> None:
        """End the backward pass; in a nested one, if activation checkpointing is reentrant."""
        self._settle()
        self.ended()


@dataclass
class Taken:
    """A bucket of DDP; its future is complete when ``missing`` is 0, the number of gradients that are not means yet."""

    future: torch.futures.Future[Tensor]
    buffer: Tensor
    missing: int


class PlannedBuckets(HookedBuckets):
    """Reduces the gradients of DDP in buckets that are cut from the model alone.

    DDP's buckets change after the first step, and again after a resumption. A bucket's reduction begins when DDP has
    handed over its last gradient, and a future of DDP completes when all gradients of its bucket are means.

    Args:
        reducer: Averages over the ranks.
        names: Names of the model's parameters, by their ``id``.
        parameters: The parameters that DDP reduces, by name. None: those of the first pass, which are reduced when all
            of them are known, at its end.
        bucket_mb: Size of a bucket in MiB.
        ended: Called at the end of each backward pass, when all gradients are means.
    """

    def __init__(
        self,
        reducer: Reducer,
        names: Mapping[int, str],
        parameters: Mapping[str, nn.Parameter] | None,
        bucket_mb: float = BUCKET_MB,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(reducer, names, ended)
        self.bucket_mb = bucket_mb
        self.reduction = None if parameters is None else self._reduction_of(parameters)
        self.parameters: dict[str, nn.Parameter] = {}  # of the first pass, until all are known
        self.gradients: dict[str, Tensor] = {}
        self.taken: dict[str, Taken] = {}  # by the name of a gradient that is not a mean yet

    def _add(
        self, bucket: dist.GradBucket, parameters: dict[str, nn.Parameter], future: torch.futures.Future[Tensor]
    ) -> None:
        """Add gradients to the buckets of the plan, or keep them until all parameters are known."""
        gradients = dict(zip(parameters, bucket.gradients(), strict=True))
        self.taken |= dict.fromkeys(gradients, Taken(future, bucket.buffer(), len(gradients)))
        if self.reduction is None:
            self.parameters |= parameters
            self.gradients |= gradients
            return
        for name, gradient in gradients.items():
            self.reduction.add(name, gradient)

    def _complete(self) -> bool:
        """Whether all buckets of the plan are complete; in the first pass, plan and reduce them."""
        if self.reduction is None:
            in_order = {name: self.parameters[name] for name in self.names.values() if name in self.parameters}
            self.reduction = self._reduction_of(in_order)
            for name, gradient in self.gradients.items():
                self.reduction.add(name, gradient)
            self.gradients, self.parameters = {}, {}
        return self.reduction.complete

    def _reduction_of(self, parameters: Mapping[str, nn.Parameter]) -> BucketReduction:
        """The reduction of some parameters."""
        few = self.reducer.mixes(tuple(parameter.shape) for parameter in parameters.values())
        return BucketReduction(self.reducer, plan(parameters, self.bucket_mb, 1 if few else FEWEST), self._release)

    def _settle(self) -> None:
        """Wait until all gradients that were added are means, and start over."""
        if self.reduction is not None:
            self.reduction.settle()
        self.taken.clear()
        self.gradients.clear()

    def _release(self, names: Collection[str]) -> None:
        """Complete the futures of the buckets that miss no other gradient; only the reducer's queue calls this."""
        for name in names:
            taken = self.taken.pop(name)
            taken.missing -= 1
            if not taken.missing:
                taken.future.set_result(taken.buffer)


def hooked_buckets(
    reducer: Reducer,
    names: Mapping[int, str],
    shapes: Iterable[tuple[int, ...]],
    parameters: Mapping[str, nn.Parameter] | None = None,
    ended: Callable[[], object] = lambda: None,
) -> HookedBuckets:
    """Return the reduction of a user's DDP, in its buckets if the result does not depend on them.

    Args:
        reducer: Averages over the ranks.
        names: As for `PlannedBuckets`; so are ``parameters`` and ``ended``.
        shapes: The shapes of the parameters.
    """
    if reducer.apart(shapes):
        return HookedBuckets(reducer, names, ended)
    return PlannedBuckets(reducer, names, parameters, ended=ended)


# Why: docs/decisions.md, "`comm_hook` ends its steps itself".
class CommHookState(Attached):
    """The state of `comm_hook`: a reducer, and a torch `Stateful`, whose ``state_dict`` belongs in a checkpoint.

    Args:
        parameters: The trainable parameters of the model.
        make: Builds the reducer, and checks that the ranks agree; called now, or at the first reduction if there is no
            process group yet.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], make: Callable[[], Reducer]) -> None:
        # Not the parameters: the state would keep DDP alive, and DDP the state.
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._shapes = [tuple(parameter.shape) for parameter in parameters.values()]
        self._device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        self._make = make
        self._buckets = self._build() if dist.is_initialized() else None

    def _build(self) -> HookedBuckets:
        reducer = self._make()
        reducer.prepare("all_reduce", sum(map(math.prod, self._shapes)))
        reducer.connect("all_reduce", self._shapes, self._device)
        return hooked_buckets(reducer, self._names, self._shapes, ended=reducer.finish)

    @property
    def buckets(self) -> HookedBuckets:
        """The reduction of buckets; it needs a process group."""
        if self._buckets is None:
            self._buckets = self._build()
        return self._buckets

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket of DDP; as `HookedBuckets.take`."""
        return self.buckets.take(bucket)

    @property
    def reducer(self) -> Reducer:
        """The reducer; it needs a process group."""
        return self.buckets.reducer

    @property
    def traffic(self) -> dict[str, Any]:
        """Bytes of this rank since the start; see `Reducer.traffic`."""
        return self.reducer.traffic

    def state_dict(self) -> dict[str, Any]:
        """Residuals, compressor states and generators of this rank, as `Reducer.state_dict`."""
        return self.reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank; a resumed run then equals an uninterrupted one."""
        self.reducer.load_state_dict(state)
        self.reducer.codec.check_names({*self._names.values()})


class TakesBuckets(Protocol):
    """The state of a hook."""

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket of DDP; as `HookedBuckets.take`."""


def reduce_bucket(state: TakesBuckets, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: DDP calls it with each bucket of a backward pass that synchronizes."""
    return state.take(bucket)


@checked_arguments
def comm_hook(
    model: InstanceOf[nn.Module], compressor: Compressor | str | Mapping[str, Any], **options: Any
) -> tuple[CommHookState, Callable[[TakesBuckets, dist.GradBucket], torch.futures.Future[Tensor]]]:
    """Return ``(state, hook)`` that compress the gradients of DDP: ``ddp.register_comm_hook(state, hook)``.

    Every backward pass that synchronizes is one step of the reducer, so nothing is left to call. A NaN or infinity
    passes on to the gradients of all ranks, as with torch's own hooks and `compress_gradients`, unless
    ``nonfinite="raise"`` is given.

    Args:
        model: The model, before or after DDP wraps it; names and order of its trainable parameters are read now.
        compressor: A compressor, its name, or a mapping of its ``method`` and options.
        options: Those of `Reducer`, such as ``error_feedback=True``.

    Raises:
        BadInput: If the compressor or an option is unknown or invalid, the model is sharded, prepared by `wrap` or on
            the meta device, or its gradients are sparse or complex; or if ranks differ: at once, or without a process
            group at the first backward pass.
    """
    options = {"nonfinite": "propagate", **options}
    chosen = as_compressor(compressor)
    check_options(chosen, **options)
    if isinstance(model, FSDPModule | FullyShardedDataParallel):
        raise BadInput(
            f"{type(model).__name__} is sharded, and comm_hook is for DistributedDataParallel: use "
            f"gradwire.compress_gradients for FSDP2."
        )
    check_unprepared(model, DistributedDataParallel)
    check_has_values(model)
    check_gradients(model)
    described = parameters_of(model)

    def make() -> Reducer:
        reducer = Reducer(chosen, **options)
        check_agreement(reducer.group, reducer, described)
        return reducer

    return CommHookState(trainable(model), make), reduce_bucket
