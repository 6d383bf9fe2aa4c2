"""Naive data parallelism, as a textbook shows it: each gradient is averaged as soon as it is accumulated.

`Replicas` is what it shares with `parallel.bucket`: equal weights at the start, and a hook on every gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from gradwire.collectives import Layout, Reducer, ops
from gradwire.errors import RunFault
from gradwire.parallel.strategy import Strategy


class Replicas(Strategy):
    """A whole model on every rank; hooks on its parameters average their gradients during the backward pass.

    Nothing is wrapped around the model, so its names stay. The ranks start with rank 0's parameters and buffers. As
    under DDP, every parameter that requires a gradient by then must get one in every backward pass that averages.
    """

    kind = "all_reduce"

    def __init__(self, group: ops.Group, device: torch.device) -> None:
        super().__init__(group, device)
        self.world = dist.get_world_size(group)
        self.reducer: Reducer | None = None
        self.parameters: dict[str, nn.Parameter] = {}  # those that are trained; a tied one once
        self._layout = cache(partial(Layout.dim0, world=self.world))
        self._paused = 0  # depth of `no_sync`
        self._backward = -1  # the backward pass under way, as autograd numbers it
        self._missing: set[str] = set()  # parameters that got no gradient in it yet

    def wrap(self, model: nn.Module) -> nn.Module:
        """Broadcast rank 0's weights, and watch the gradient of every parameter that is trained."""
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(tensor.detach(), self.group)
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))
        return model

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Have the reducer average from now on."""
        self.reducer = reducer

    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """`no_sync` but for the last micro-batch."""
        return nullcontext() if last else self.no_sync()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to this rank's own gradients; the next one outside averages all of it."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _accumulated(self, name: str, _: nn.Parameter) -> None:
        """Autograd's hook: a parameter's ``grad`` holds all that this backward pass adds to it."""
        if self._backward != (backward := torch._C._current_graph_task_id()):
            self.settle()  # an exception may have broken off the pass before
            self._backward, self._missing = backward, set(self.parameters)
            if not self._paused:  # nothing public tells when a backward pass ends; DDP and FSDP use this as well
                Variable._execution_engine.queue_callback(self._ended)
        self._missing.discard(name)
        self.keep(name)
        if not self._paused:
            self.ready(name)

    def _ended(self) -> None:
        """Autograd's callback at the end of a backward pass that averages."""
        self.settle()
        if missing := [name for name in self.parameters if name in self._missing]:
            raise RunFault(
                f"{len(missing)} of {len(self.parameters)} parameters got no gradient in the backward pass that "
                f"averages: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Use them in the loss, or "
                "freeze them before `wrap`. (Activation checkpointing needs use_reentrant=False.)"
            )

    def keep(self, name: str) -> None:
        """Put a gradient where it belongs, inside of `no_sync` as well."""

    @abstractmethod
    def ready(self, name: str) -> None:
        """A parameter's gradient is there to be averaged."""

    def settle(self) -> None:
        """Wait for all that is on its way."""

    def through_reducer(self, gradients: dict[str, Tensor]) -> None:
        """Replace contiguous gradients by their means over the ranks."""
        assert self.reducer is not None
        layout = self._layout(tuple((name, tuple(self.parameters[name].shape)) for name in gradients))
        layout.unpack(self.reducer.all_reduce(layout.pack(gradients), layout), gradients)


class Naive(Replicas):
    """One all-reduce per parameter; the backward pass waits for each."""

    def ready(self, name: str) -> None:
        """Average the gradient at once."""
        gradient = self.parameters[name].grad
        assert gradient is not None
        mean = gradient.contiguous()
        if self.reducer is not None:
            self.through_reducer({name: mean})
        else:
            mean = ops.all_reduce(divided(mean, self.world), "sum", self.group, "payload")
        gradient.copy_(mean)


def divided(gradient: Tensor, world: int) -> Tensor:
    """A rank's summand of the mean: in place, but for types narrower than float32, which are summed in float32."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)).div_(world)


def broadcast(tensor: Tensor, group: ops.Group) -> None:
    """Give every rank rank 0's values, in place; as bytes, because not every backend knows every type."""
    values = tensor.contiguous()
    ops.broadcast(values.view(-1).view(torch.uint8), 0, group, "parameters")
    tensor.copy_(values)
