"""Naive data parallelism, as in a textbook: each gradient is averaged as soon as it is accumulated.

`Replicas` is the base that it shares with `bucket`: equal initial weights, and a hook on every gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwire.base.errors import RunFault, listed
from gradwire.comm.collectives import Layout, Reducer, ops
from gradwire.comm.parallel.model import trainable
from gradwire.comm.parallel.strategy import Strategy
from gradwire.comm.torch_internals import at_end_of_backward, backward_id


# Why: docs/decisions.md, "`naive` and `bucket` wrap nothing".
class Replicas(Strategy):
    """A whole model on every rank; hooks on its parameters average their gradients during the backward pass.

    The model is not wrapped, so its names stay. The ranks start with rank 0's parameters and buffers. Each forward pass
    looks its parameters up by name, so they may be replaced, converted, frozen or unfrozen, on all ranks alike. As with
    DDP, every trainable one must get a gradient in every backward pass that averages.
    """

    kind = "all_reduce"
    alone = True

    def __init__(self, group: ops.Group, device: torch.device) -> None:
        super().__init__(group, device)
        self.world = dist.get_world_size(group)
        self.reducer: Reducer | None = None
        self.parameters: dict[str, nn.Parameter] = {}  # trainable ones; a tied one once
        self._hooks: list[RemovableHandle] = []  # of the parameters
        self._layout = cache(partial(Layout.dim0, world=self.world))
        self._paused = 0  # depth of `no_sync`
        self._backward = -1  # autograd's id of the current backward pass
        self._missing: set[str] = set()  # parameters that have no gradient from it yet

    def wrap(self, model: nn.Module) -> nn.Module:
        """Broadcast rank 0's weights, and register hooks on the model and every trainable parameter."""
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(tensor.detach(), self.group)
        self.adopt(trainable(model))
        model.register_forward_pre_hook(LookUp(self, model))
        return model

    def adopt(self, parameters: dict[str, nn.Parameter]) -> None:
        """Average the gradients of these parameters from now on."""
        for hook in self._hooks:
            hook.remove()
        self.parameters = parameters
        self._hooks = [
            # weakly: what a gradient's hook refers to, the garbage collector does not see
            parameter.register_post_accumulate_grad_hook(partial(accumulated, ref(self), name))
            for name, parameter in parameters.items()
        ]

    def changed_parameters(self, parameters: dict[str, nn.Parameter]) -> bool:
        """Whether others must be adopted."""
        return [*map(id, parameters.values())] != [*map(id, self.parameters.values())]

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Average with the reducer from now on."""
        self.reducer = reducer

    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Use `no_sync` except for the last micro-batch."""
        return nullcontext() if last else self.no_sync()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the next backward pass outside the context averages the sum."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def accumulated(self, name: str) -> None:
        """Record that this backward pass has finished a parameter's ``grad``.

        Raises:
            RunFault: If there is none: the parameter was frozen after the forward pass.
        """
        if self.parameters[name].grad is None:
            raise RunFault(
                f"{name} was frozen between the forward and the backward pass: freeze it before the forward."
            )
        if self._backward != (backward := backward_id()):
            self.settle()  # an exception may have interrupted the previous pass
            self._backward, self._missing = backward, set(self.parameters)
            if not self._paused:
                at_end_of_backward(self._ended)
        self._missing.discard(name)
        self.keep(name)
        if self._paused:
            self.added.add(name)
        else:
            self.added.discard(name)
            self.ready(name)

    def _ended(self) -> None:
        """Autograd's callback at the end of a backward pass that averages."""
        self.settle()
        missing = [name for name in self.parameters if name in self._missing]
        if frozen := [name for name in missing if not self.parameters[name].requires_grad]:
            raise RunFault(
                f"{listed(frozen, 5)} were frozen after the model was last called: call the model itself and not a "
                f"part of it, as its forward pass looks parameters up."
            )
        if missing:
            raise RunFault(
                f"{len(missing)} of {len(self.parameters)} parameters got no gradient in the backward pass that "
                f"averages: {listed(missing, 5)}. Use them in the loss, or freeze them. "
                "(Activation checkpointing needs use_reentrant=False.)"
            )

    def keep(self, name: str) -> None:
        """Store an accumulated gradient, also inside `no_sync`."""

    @abstractmethod
    def ready(self, name: str) -> None:
        """Average a parameter's gradient, which is now complete."""

    def settle(self) -> None:
        """Wait for pending collectives."""

    def through_reducer(self, gradients: dict[str, Tensor]) -> None:
        """Replace contiguous gradients with their means over the ranks."""
        assert self.reducer is not None
        layout = self._layout(tuple((name, tuple(self.parameters[name].shape)) for name in gradients))
        layout.unpack(self.reducer.all_reduce(layout.pack(gradients), layout), gradients)


class Naive(Replicas):
    """One all-reduce per parameter; the backward pass waits for each."""

    name = "naive"

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


def accumulated(replicas: ref[Replicas], name: str, _: nn.Parameter) -> None:
    """Autograd's hook of a parameter; it does nothing when the model is gone that was wrapped."""
    if (strategy := replicas()) is not None:
        strategy.accumulated(name)


class LookUp:
    """The model's hook before a forward pass; copies of the model have one that does nothing.

    Args:
        strategy: The strategy.
        wrapped: The model.
    """

    def __init__(self, strategy: Replicas | None = None, wrapped: nn.Module | None = None) -> None:
        self._strategy = ref(strategy) if strategy is not None else lambda: None
        self._wrapped = ref(wrapped) if wrapped is not None else lambda: None

    @torch.compiler.disable
    def __call__(self, model: nn.Module, _: object) -> None:
        """Adopt the parameters that the model has now."""
        strategy = self._strategy()
        if model is self._wrapped() and strategy is not None:
            parameters = trainable(model)
            if strategy.changed_parameters(parameters):
                strategy.adopt(parameters)

    def __reduce__(self) -> tuple[Any, ...]:
        """Do nothing in a copy."""
        return LookUp, ()


def divided(gradient: Tensor, world: int) -> Tensor:
    """Divide a gradient by ``world``: in place, except types narrower than float32, which become float32."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)).div_(world)


def broadcast(tensor: Tensor, group: ops.Group) -> None:
    """Copy rank 0's values to every rank, in place; sent as bytes, because not every backend supports every dtype."""
    values = tensor.contiguous()
    ops.broadcast(values.view(-1).view(torch.uint8), 0, group, "parameters")
    tensor.copy_(values)
