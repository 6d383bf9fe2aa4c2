"""Base class of strategies: how a framework wraps a model and calls the reducer; accumulation and clipping."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import IslandReducer, Reducer, ops
from gradwire.comm.collectives.layout import Kind
from gradwire.comm.collectives.ops import Group
from gradwire.comm.collectives.parameters import Replica
from gradwire.comm.parallel import mesh
from gradwire.comm.parallel.attached import Attached
from gradwire.comm.parallel.buckets import BUCKET_MB, MB
from gradwire.comm.parallel.mesh import has_gradient, local
from gradwire.comm.parallel.names import named_parameters, trainable
from gradwire.comm.torch_internals import at_end_of_backward, backward_id, computes_gradients


class Strategy(Attached, ABC):
    """A kind of data parallelism; every wrapped model has its own instance.

    Args:
        group: The ranks; None is the default group.
        device: The model's device.

    Attributes:
        added: Names of the parameters to whose gradients a backward pass has added after their last reduction, as far
            as the strategy takes notice.
    """

    name: ClassVar[str]
    """The strategy's name; its file, or its entry point, has the same."""

    kind: ClassVar[Kind]
    """The collective that reduces gradients; after a reduce-scatter each rank holds only its shard of them."""

    alone: ClassVar[bool] = False
    """Whether each rank, or each island, holds a full model, so that it can train without averaging."""

    averages: bool = True
    """Whether gradients are averaged; if not, an optimizer communicates (`comm.parallel.optimizers`)."""

    replicas: Mapping[str, Replica] = MappingProxyType({})
    """Parameters that ranks compute with instead of gathered ones, by the name of the first one in each."""

    reduced: bool = False
    """Whether a reducer will replace the framework's reduction; known before `wrap`."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.added: set[str] = set()

    @classmethod
    def build(cls, reducer: Reducer | None, device: torch.device, **options: Any) -> Self:
        """Build the strategy for the reducer's ranks, or for all ranks.

        Raises:
            BadInput: If the reducer does not suit the strategy.
        """
        if isinstance(reducer, IslandReducer) and reducer.islands.ranks > 1:
            raise BadInput("an IslandReducer averages between islands only: use strategy hsdp, or a Reducer.")
        return cls(reducer.group if reducer else None, device, **options)

    @property
    def shards(self) -> Group:
        """The ranks that together hold one model, if it is sharded."""
        return self.group

    @property
    def copies(self) -> Group:
        """The ranks that hold the same parameters, if `alone`."""
        return self.group

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules to shard one by one before the rest; warn where a large model is sharded as a whole."""
        repeated = blocks(model)
        size = sum(parameter.nbytes for parameter in model.parameters())
        if not repeated and size > BUCKET_MB * MB and dist.get_world_size(self.shards) > 1:
            warnings.warn(
                f"strategy {self.name} finds no blocks in {type(model).__name__} (an nn.ModuleList, or modules of one "
                f"class in an nn.ModuleDict or nn.Sequential), so each rank gathers all of its {size / MB:.0f} MiB at "
                f"once, and nothing overlaps. Put its layers into an nn.ModuleList, or call fully_shard on them and on "
                f"the model, and then gradwire.compress_gradients.",
                stacklevel=4,
            )
        return repeated

    @property
    def communicates(self) -> bool:
        """Whether the backward pass of an optimizer step's last micro-batch communicates."""
        return self.averages

    def prepare(self, reducer: Reducer, shapes: Sequence[tuple[int, ...]]) -> None:
        """Prepare the reducer for a model with trainable parameters of some shapes, and connect its ranks."""
        reducer.prepare(self.kind, sum(map(math.prod, shapes)))
        reducer.connect(self.kind, shapes, self.device)

    def mesh(self) -> DeviceMesh:
        """Return the ranks as a mesh of one dimension, ``dp``."""
        return mesh.build(self.device.type, self.group)

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model that is on `device`."""

    @abstractmethod
    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Replace the framework's reduction with the reducer, for more than one rank.

        Raises:
            BadInput: If this version of torch does not support it.
        """

    def averaged(self, wrapped: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters whose gradients are averaged, as they are now, by name."""
        return trainable(wrapped)

    def held_back(self, wrapped: nn.Module) -> list[str]:
        """Return the parameters with a gradient to which a backward pass has added after its last reduction."""
        parameters = named_parameters(wrapped) if self.added else ()
        return [name for name, p in parameters if name in self.added and has_gradient(p)]

    def left_out(self, wrapped: nn.Module) -> set[str]:
        """Return the parameters that this rank's backward passes left out, and whose mean may be without a use."""
        return set()

    def leave_out(self, wrapped: nn.Module, names: set[str]) -> None:
        """Leave parameters without a gradient that all ranks left out."""

    def reduced_numel(self, wrapped: nn.Module) -> int:
        """Return the number of elements that the framework itself would reduce in a step, padding included."""
        return sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)

    def changed(self, wrapped: nn.Module) -> None:
        """Take over parameters that were changed in place, other than by an optimizer step after a backward pass."""

    def keep_apart(self, wrapped: nn.Module) -> None:
        """Never reduce gradients, also outside of `accumulation`."""
        self._apart = ExitStack()
        self._apart.enter_context(self.accumulation(wrapped, last=False))

    @abstractmethod
    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """See `comm.parallel.accumulation`."""


def attach(wrapped: nn.Module, strategy: Strategy) -> None:
    """Store the strategy on the model that it wrapped."""
    wrapped.gradwire_strategy = strategy  # type: ignore[assignment]


def is_prepared(model: nn.Module) -> bool:
    """Whether a model has a strategy; copies of one have none."""
    return isinstance(getattr(model, "gradwire_strategy", None), Strategy)


def strategy_of(wrapped: nn.Module) -> Strategy:
    """Return the strategy of a model returned by `comm.parallel.wrap`.

    Raises:
        BadInput: For any other model.
    """
    strategy = getattr(wrapped, "gradwire_strategy", None)
    if not isinstance(strategy, Strategy):
        raise BadInput(f"{type(wrapped).__name__} was not returned by gradwire.comm.parallel.wrap.")
    return strategy


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules sharded as one, the transformer blocks: the repeated module that holds the most parameters.

    They are the children of an `nn.ModuleList`, or of a `repeats` in another container, that is in no other one, as
    every architecture of transformers has it.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) or repeats(module)]
    inner = {id(module) for outer in lists for module in outer.modules() if module is not outer}
    outer = [module for module in lists if id(module) not in inner]
    largest = max(outer, key=lambda each: sum(p.numel() for p in each.parameters()), default=nn.ModuleList())
    return list(largest.children())


def repeats(module: nn.Module) -> bool:
    """Whether a `ModuleDict` or `Sequential` holds modules of one class that are themselves made of modules.

    Those of layers such as `Linear`, or of containers, are not blocks: they have nothing in common but their class.
    """
    children = list(module.children())
    return (
        isinstance(module, nn.ModuleDict | nn.Sequential)
        and len({type(child) for child in children}) == 1
        and not any(isinstance(child, nn.ModuleDict | nn.ModuleList | nn.Sequential) for child in children)
        and all(list(child.children()) for child in children)
    )


def compile_blocks(model: nn.Module) -> None:
    """Compile each of `blocks` in place, before the model is wrapped: their code is the same, and is compiled once.

    What a framework's hooks do stays outside of the compiled code, and parameters keep their names.
    """
    for block in blocks(model):
        block.compile()


def block_sizes(model: nn.Module) -> list[int]:
    """Return the number of elements outside the blocks, then that of each block."""
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks(model)]
    return [sum(parameter.numel() for parameter in model.parameters()) - sum(sizes), *sizes]


def accumulation(model: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Context for the forward **and** backward pass of one micro-batch; gradients are reduced in the last one only.

    Args:
        model: The model returned by `wrap`; with ``average=False`` gradients are never reduced, under ``hsdp`` only
            inside an island.
        last: Whether this is the last micro-batch of the optimizer step.
    """
    strategy = strategy_of(model)
    return strategy.accumulation(model, last and strategy.communicates)


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their total Euclidean norm is at most ``max_norm``.

    Returns:
        The norm over the whole model before clipping, equal on ranks whose models have equal gradients. If it is not
        finite, nothing is scaled.
    """
    strategy = strategy_of(model)
    gradients = local_gradients(model)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    square = torch.stack([torch.zeros((), dtype=torch.float32, device=strategy.device), *norms]).double().square().sum()
    if strategy.kind == "reduce_scatter":
        ops.all_reduce(square, "sum", strategy.shards)
    total = square.sqrt().item()
    if max_norm < total < float("inf"):
        for gradient in gradients:
            gradient.mul_(max_norm / total)
    return total


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Return this rank's gradients: full for a replicated model, shards for a sharded one."""
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    return [local(gradient) for gradient in gradients]


def in_backward() -> bool:
    """Whether this thread runs a backward pass, or a forward pass that one repeats for its activations."""
    return backward_id() >= 0


# Why: docs/decisions.md, "The end of a backward pass".
class EndOfBackward:
    """Calls a function at the end of each backward pass in which `expect` was called.

    Args:
        call: The function. What it raises, ``backward`` raises.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self._backward = -1  # autograd's id of the last pass

    def expect(self) -> bool:
        """Call the function at the end of the current pass; called from a gradient hook.

        Returns:
            Whether there is such a pass. Outside of one, as `torch.distributed.pipelining` reduces gradients, and at
            its end, as DDP does in the first pass of a static graph, nobody waits later, so the hook must.
        """
        if not in_backward() or not computes_gradients():
            return False
        if self._backward != (backward := backward_id()):
            self._backward = backward
            at_end_of_backward(self.call)
        return True
