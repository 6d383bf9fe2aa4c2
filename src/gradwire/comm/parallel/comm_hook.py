"""A communication hook for DDP in torch's own protocol: a state and a function. Reductions overlap with backward.

It fits `DistributedDataParallel.register_comm_hook(state, hook)` (PyTorch, "DDP Communication Hooks"), Lightning's
``DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook)``, and a model that Accelerate has prepared.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pydantic import InstanceOf
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.base.errors import BadInput
from gradwire.base.strict import checked_arguments
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.meter import Traffic
from gradwire.comm.collectives.reducer import check_options
from gradwire.comm.compressors import as_compressor
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.parallel.checks import check_agreement, check_gradients, check_has_values, parameters_of
from gradwire.comm.parallel.model import trainable
from gradwire.comm.parallel.strategies.ddp import HookedBuckets, TakesBuckets, hooked_buckets, noted, reduce_bucket
from gradwire.comm.parallel.strategy import Attached, after_steps, check_unprepared


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
        self._unused = Unused({*parameters})
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(noted, self._unused.added, name))
        self._device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        self._make = make
        self._buckets = self._build() if dist.is_initialized() else None
        self._awaited = True  # until the first bucket comes, or an optimizer steps without one
        after_steps(self, self._stepped)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        """Warn, once, if an optimizer steps with gradients of the model and none came here."""
        parameters = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        if not self._awaited or not any(id(parameter) in self._names for parameter in parameters):
            return
        self._awaited = False
        if dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(
                "an optimizer has stepped, and no gradient went through comm_hook's pair: call "
                "register_comm_hook(state, hook) of the DistributedDataParallel before its first backward pass. "
                "Lightning registers DDPStrategy(ddp_comm_hook=...) on GPUs only: on a CPU, call "
                "trainer.strategy.model.register_comm_hook(state, hook) in a callback's on_train_start.",
                stacklevel=2,
            )

    def _build(self) -> HookedBuckets:
        reducer = self._make()
        reducer.prepare("all_reduce", sum(map(math.prod, self._shapes)), self._device)
        if reducer.world > 1:
            reducer.watch(self._unused)
        return hooked_buckets(reducer, self._names, self._shapes, ended=reducer.finish)

    @property
    def buckets(self) -> HookedBuckets:
        """The reduction of buckets; it needs a process group."""
        if self._buckets is None:
            self._buckets = self._build()
        return self._buckets

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket of DDP; as `HookedBuckets.take`."""
        self._awaited = False
        if self.reducer.world > 1:
            self._unused.note(bucket, self._names, self.reducer)
        return self.buckets.take(bucket)

    @property
    def reducer(self) -> Reducer:
        """The reducer; it needs a process group."""
        return self.buckets.reducer

    @property
    def traffic(self) -> Traffic:
        """Bytes of this rank since the start; see `Reducer.traffic`."""
        return self.reducer.traffic

    def state_dict(self) -> dict[str, Any]:
        """Residuals, compressor states and generators of this rank, as `Reducer.state_dict`."""
        return self.reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank; a resumed run then equals an uninterrupted one."""
        self.reducer.load_state_dict(state)
        self.reducer.codec.check_names({*self._names.values()})


class Unused:
    """The parameters that no backward pass of a step used, for which DDP reduces zeros; a `StepCheck`.

    Args:
        names: All parameters.

    Attributes:
        added: Those to whose gradients a backward pass has added after their last reduction.
    """

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.added: set[str] = set()
        self._unused: set[str] = set()

    def note(self, bucket: dist.GradBucket, names: Mapping[int, str], reducer: Reducer) -> None:
        """Hold what is kept of the parameters of a bucket that no backward pass used, before it is reduced."""
        taken = {names.get(id(parameter), "") for parameter in bucket.parameters()}
        self._unused |= taken - self.added
        reducer.codec.hold(taken - self.added)
        self.added -= taken

    def begun(self, layout: Layout) -> None:
        """As `StepCheck.begun`."""

    def finish(self) -> list[str]:
        """Return no parameter: DDP reduces all that it has, and each backward pass ends a step."""
        return []

    def left_out(self) -> set[str]:
        """As `StepCheck.left_out`."""
        unused, self._unused = self._unused, set()
        return unused

    def leave_out(self, names: set[str]) -> None:
        """As `StepCheck.leave_out`; DDP leaves them without a gradient itself."""


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
