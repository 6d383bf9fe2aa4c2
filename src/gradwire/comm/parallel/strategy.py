"""Base class of strategies: how a framework wraps a model and calls the reducer."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import IslandReducer, Reducer
from gradwire.comm.collectives.ops import Group
from gradwire.comm.collectives.reducer import Kind
from gradwire.comm.collectives.replica import Replica
from gradwire.comm.parallel import mesh
from gradwire.comm.parallel.buckets import BUCKET_MB, MB
from gradwire.comm.parallel.names import inside, named_parameters, trainable, unwrapped


class Strategy(ABC):
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
    """Whether ranks can train apart (``average=False``): each one, or each island, has all parts of a model."""

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
        found = blocks(model)
        size = sum(parameter.nbytes for parameter in model.parameters())
        if not found and size > BUCKET_MB * MB and dist.get_world_size(self.shards) > 1:
            warnings.warn(
                f"strategy {self.name} finds no blocks in {type(model).__name__} (an nn.ModuleList, or modules of one "
                f"class in an nn.ModuleDict or nn.Sequential), so each rank gathers all of its {size / MB:.0f} MiB at "
                f"once, and nothing overlaps. Put its layers into an nn.ModuleList, or call fully_shard on them and on "
                f"the model, and then gradwire.compress_gradients.",
                stacklevel=4,
            )
        return found

    @property
    def communicates(self) -> bool:
        """Whether the backward pass of an optimizer step's last micro-batch communicates."""
        return self.averages

    def prepare(self, reducer: Reducer, numel: int) -> None:
        """Prepare the reducer for a model of ``numel`` trainable elements."""
        reducer.prepare(self.kind, numel)

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

    def reduced_numel(self, wrapped: nn.Module) -> int:
        """Return the number of elements that the framework itself would reduce in a step, padding included."""
        return sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)

    def changed(self, wrapped: nn.Module) -> None:  # noqa: B027  nothing to do for replicas
        """Take over parameters that were changed in place, other than by an optimizer step after a backward pass."""

    def keep_apart(self, wrapped: nn.Module) -> None:
        """Never reduce gradients, also outside of `accumulation`."""
        self._apart = ExitStack()
        self._apart.enter_context(self.accumulation(wrapped, last=False))

    @abstractmethod
    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """See `comm.parallel.accumulation`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:  # noqa: B027  of None there is nothing to say
        """Return None: a copy of a wrapped model, such as an average of its weights, is not wrapped."""


def attach(wrapped: nn.Module, strategy: Strategy) -> None:
    """Store the strategy on the model that it wrapped."""
    wrapped.gradwire_strategy = strategy  # type: ignore[assignment]


def check_unprepared(model: nn.Module, *wrappers: type) -> None:
    """Check that `comm.parallel.wrap` has prepared no part of a model: its reducer would average a second time.

    Args:
        model: The model.
        wrappers: Frameworks' wrappers, which may be prepared.

    Raises:
        BadInput: If it has.
    """
    for module in model.modules():
        if hasattr(module, "gradwire_strategy") and not isinstance(module, wrappers):
            raise BadInput(
                f"{type(module).__name__} is prepared already, by gradwire.comm.parallel.wrap with strategy "
                f"{strategy_of(module).name}: pass a model that is not."
            )


def check_gradients(model: nn.Module) -> None:
    """Check that a reducer can average all gradients of a model; warn if it loses precision.

    Raises:
        BadInput: If a gradient is complex or sparse: a reducer averages dense vectors of real numbers.
    """
    for name, module in inside(model).named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise BadInput(
                f"{unwrapped(name) or type(module).__name__} has sparse gradients, and a reducer averages dense ones: "
                f"build it with sparse=False."
            )
    trained = {name: p for name, p in named_parameters(model) if p.requires_grad}
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise BadInput(
                f"{name} is {shown_type(parameter)}, and a reducer averages real gradients: store its real and "
                f"imaginary part (torch.view_as_real), and combine them in forward (torch.view_as_complex)."
            )
    if wide := [name for name, parameter in trained.items() if parameter.dtype == torch.float64]:
        warnings.warn(
            f"gradients travel as float32 at most, and {len(wide)} parameters are float64 ({wide[0]}, …): their means "
            f"are rounded to float32.",
            stacklevel=3,
        )


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether an optimizer would use this rank's part of a gradient; one of zeros is that of an unused parameter."""
    return parameter.grad is not None and bool(mesh.local(parameter.grad).count_nonzero())


def shown_type(parameter: nn.Parameter) -> str:
    """Return a parameter's type as text."""
    return str(parameter.dtype).removeprefix("torch.")


def check_has_values(model: nn.Module) -> None:
    """Check that no parameter or buffer of a model is on the meta device: there is nothing to broadcast, or to train.

    Raises:
        BadInput: If one is.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise BadInput(
                f"{name} of {type(model).__name__} is on the meta device and has no values: build the model on the "
                f"CPU, or call model.to_empty(device=...) and set or load its values first. To fill shards only, call "
                f"fully_shard, then to_empty, set or load the values, and then call gradwire.compress_gradients."
            )


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
