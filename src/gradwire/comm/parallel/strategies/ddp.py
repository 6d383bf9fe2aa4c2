"""DistributedDataParallel: replicas, and an all-reduce of the gradients during the backward pass."""

# No `annotations` import: DDP rejects annotations of its hook's arguments that are strings.
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.base.errors import RunFault
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.ops import Group
from gradwire.comm.collectives.queue import Handle
from gradwire.comm.parallel.buckets import BUCKET_MB, FEWEST, MB, BucketReduction, plan
from gradwire.comm.parallel.model import trainable, unwrapped
from gradwire.comm.parallel.strategy import Attached, EndOfBackward, Strategy
from gradwire.comm.torch_internals import FIRST_BUCKET_BYTES, join_runs

Note: TypeAlias = Callable[[DistributedDataParallel, Reducer, set[str]], None]
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]  # of parameters, by name
PARTS = 4  # buckets that DDP makes of one of ours, so that ours are complete early


class DDP(Strategy):
    """Replicated parameters; the reducer is DDP's communication hook.

    Gradients of a model that this strategy wrapped are reduced in buckets that are cut from the model alone
    (`PlannedBuckets`).

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
        """Return the parameters whose gradient DDP has left as it was, as all ranks left them out; begin a step.

        It is None, or zeros where gradients are set to zero.
        """
        unused, self._unused = self._unused, set()
        left = {name: p for name, p in self.averaged(wrapped).items() if name in unused}
        return {name for name, p in left.items() if p.grad is None or not p.grad.any()}

    def keep_apart(self, wrapped: nn.Module) -> None:
        """As `Strategy.keep_apart`, and not in copies of the model."""
        super().keep_apart(wrapped)
        wrapped.require_backward_grad_sync = Off()  # type: ignore[assignment]

    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Use `no_sync` except for the last micro-batch."""
        assert isinstance(wrapped, DistributedDataParallel)
        return nullcontext() if last else wrapped.no_sync()


class Off:
    """A setting that is off, as False, and on in a copy of what has it, or in one that was pickled."""

    def __bool__(self) -> bool:
        """Return False."""
        return False

    def __deepcopy__(self, memo: dict[int, object]) -> bool:
        """Return True."""
        return True

    def __reduce__(self) -> tuple[type[bool], tuple[bool]]:
        """Load as True."""
        return bool, (True,)


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


class TakesBuckets(Protocol):
    """The state of a hook."""

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket of DDP; as `HookedBuckets.take`."""


def reduce_bucket(state: TakesBuckets, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: DDP calls it with each bucket of a backward pass that synchronizes."""
    return state.take(bucket)


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
