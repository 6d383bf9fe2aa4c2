"""What a strategy is: how a framework wraps a model, and where the reducer goes in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.collectives import Reducer
from gradwire.collectives.ops import Group
from gradwire.collectives.reducer import Kind
from gradwire.errors import BadInput
from gradwire.parallel import mesh


class Strategy(ABC):
    """One way to train on many ranks; every wrapped model has an instance.

    Args:
        group: The ranks; None is the default group.
        device: Where the model computes.
    """

    kind: ClassVar[Kind]
    """The collective that reduces gradients; after a reduce-scatter each rank holds only its part of them."""

    averages: bool = True
    """Whether gradients are averaged at all; if not, an optimizer communicates (`parallel.optimizers`)."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.device = device

    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh of one dimension, ``dp``."""
        return mesh.build(self.device.type, self.group)

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Hand the model, which lies on `device`, to the framework."""

    @abstractmethod
    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Put the reducer in the place of the framework's own reduction (with more than one rank).

        Raises:
            BadInput: If this version of torch does not offer what that takes.
        """

    def reduced_numel(self, wrapped: nn.Module) -> int:
        """Elements of the buffers that the framework's own reduction is given in a step, its padding included."""
        return sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)

    @abstractmethod
    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """See `parallel.accumulation`."""


def attach(wrapped: nn.Module, strategy: Strategy) -> None:
    """Note the strategy on the model that it wrapped."""
    wrapped.gradwire_strategy = strategy  # type: ignore[assignment]


def strategy_of(wrapped: nn.Module) -> Strategy:
    """The strategy of a model that `parallel.wrap` returned.

    Raises:
        BadInput: If it is another model.
    """
    strategy = getattr(wrapped, "gradwire_strategy", None)
    if not isinstance(strategy, Strategy):
        raise BadInput(f"{type(wrapped).__name__} did not come from gradwire.parallel.wrap.")
    return strategy


def units(model: nn.Module) -> list[nn.Module]:
    """What is sharded as one: the children of the model's first `nn.ModuleList`, its transformer blocks."""
    blocks = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return list(next(blocks, []))


def unit_sizes(model: nn.Module) -> list[int]:
    """Elements of what is sharded as one: first what is in no block, then each block."""
    blocks = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units(model)]
    return [sum(parameter.numel() for parameter in model.parameters()) - sum(blocks), *blocks]
