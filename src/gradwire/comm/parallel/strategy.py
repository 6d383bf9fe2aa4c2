"""The boundary between frameworks and the reducer: a strategy wraps a model, hooks the reducer in, and accumulates.

`Strategy.install` is how a reducer comes to a model, whoever wrapped it. ``strategies/`` has one file per strategy.
"""

from __future__ import annotations

import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import IslandReducer, Layout, Reducer, ops
from gradwire.comm.collectives.layout import Kind
from gradwire.comm.collectives.ops import Group
from gradwire.comm.collectives.parameters import Replica
from gradwire.comm.parallel.buckets import BUCKET_MB, MB
from gradwire.comm.parallel.model import blocks, has_gradient, local, named_parameters, trainable
from gradwire.comm.torch_internals import at_end_of_backward, backward_id, computes_gradients, version_of

STEPPED = -1  # in place of a version: an optimizer has stepped since
HOOKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the models that have a reducer; their copies have none


# Why: docs/decisions.md, "A copy of a model has no compressor".
class Attached:
    """A part of a model that is None in a copy of the model, and in one that was pickled as a whole."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy, such as an average of the weights, is not trained."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Load as None, with a warning."""
        return detached, ()


def detached() -> None:
    """Warn that a model is loaded without what it was saved with."""
    warnings.warn(
        "the model was saved with a compressor or an optimizer that communicates, and is loaded without: call "
        "gradwire.compress_gradients, or build the optimizer, again. A state_dict has the model and no more.",
        stacklevel=2,
    )


class Strategy(Attached, ABC):
    """A kind of data parallelism; every wrapped model has its own instance.

    Args:
        group: The ranks; None is the default group.
        device: The model's device.

    Attributes:
        added: Names of the parameters to whose gradients a backward pass has added after their last reduction, as far
            as the strategy records it.
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
        reducer.prepare(self.kind, sum(map(math.prod, shapes)), self.device)

    def mesh(self) -> DeviceMesh:
        """Return the ranks as a mesh of one dimension, ``dp``."""
        group = dist.group.WORLD if self.group is None else self.group
        return DeviceMesh.from_group(group, self.device.type, mesh_dim_names=("dp",))

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model that is on `device`."""

    @abstractmethod
    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Replace the framework's reduction with the reducer, for more than one rank.

        Raises:
            BadInput: If this version of torch does not support it.
        """

    def install(self, wrapped: nn.Module, reducer: Reducer, shapes: Sequence[tuple[int, ...]]) -> Completeness | None:
        """Replace the framework's reduction with a reducer, which is prepared for trainable parameters of some shapes.

        Returns:
            What `Reducer.finish` compares the gradients with; None with one rank.
        """
        HOOKED.add(wrapped)
        if reducer.world == 1:
            return None
        watch = None
        if self.averages:  # else an optimizer communicates, and finishes
            watch = Completeness(wrapped, self)
            reducer.watch(watch)
        self.prepare(reducer, shapes)
        self.hook(wrapped, reducer)
        return watch

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


# Why: docs/decisions.md, "`finish` compares the gradients that a model has with what was reduced".
class Completeness:
    """Compares the gradients that a model has with those that were reduced in the optimizer step.

    They differ where the framework's hooks no longer see a gradient: after a forward pass around the wrapper, in a pass
    that does not synchronize, on a copy of the model, for a parameter that was replaced, converted or unfrozen.

    Args:
        model: The wrapped model. Its parameters are looked up at each step, by name.
        strategy: The model's strategy, which knows the parameters that are averaged.
    """

    def __init__(self, model: nn.Module, strategy: Strategy) -> None:
        self._model = weakref.ref(model, self._forget)
        self._strategy: Strategy | None = strategy
        self._parameters = strategy.averaged(model)
        self._reduced: dict[str, int] = {}  # in this optimizer step, with the parameter's version at the time
        self._warned = False
        after_steps(self, self._stepped)

    @property
    def names(self) -> set[str]:
        """The parameters whose gradients are averaged."""
        return {*self._parameters}

    @property
    def reduced(self) -> bool:
        """Whether a gradient was reduced since the last `finish`."""
        return bool(self._reduced)

    def begun(self, layout: Layout) -> None:
        """Record a reduction; warn, once, if a parameter has changed since it was reduced in the same step.

        Parameters change when the optimizer steps, and not between the micro-batches of one step, whether or not all of
        them are reduced. An optimizer may step in the backward pass, after each reduction. Autograd's version counters
        show a change without reading a value, and a hook the steps of torch's optimizers: one with
        ``foreach`` leaves no trace in the counters of DTensors.
        """
        for name in layout.parameters:
            version = version_of(self._parameters[name]) if name in self._parameters else 0
            if not self._warned and self._reduced.get(name, version) != version:
                self._warned = True
                warnings.warn(
                    "parameters changed between two reductions, and no step of the compressor ended: pass the "
                    "optimizers that step, as they are now, to gradwire.compress_gradients (a copy of one has no "
                    "hooks), or call finish() once per optimizer step, after backward and before optimizer.step(). "
                    "Without it schedules do not advance, and NaN or infinity is not detected.",
                    stacklevel=2,
                )
            self._reduced[name] = version

    def finish(self) -> list[str] | None:
        """End the step.

        Returns:
            The parameters that this rank has a gradient of that was not reduced; None if nothing was reduced of a model
            that has trainable parameters.
        """
        reduced, self._reduced = self._reduced, {}
        if (model := self._model()) is None or self._strategy is None:
            return [] if reduced else None
        self._parameters = self._strategy.averaged(model)
        if self._parameters and reduced.keys().isdisjoint(self._parameters):
            return None
        missing = [name for name, p in self._parameters.items() if name not in reduced and has_gradient(p)]
        return [*dict.fromkeys(missing + self._strategy.held_back(model))]

    def left_out(self) -> set[str]:
        """Return the parameters that this rank's backward passes left out in the step, and that were reduced."""
        model = self._model()
        return set() if model is None or self._strategy is None else self._strategy.left_out(model)

    def leave_out(self, names: set[str]) -> None:
        """Leave parameters without a gradient that all ranks left out."""
        if (model := self._model()) is not None and self._strategy is not None:
            self._strategy.leave_out(model, names)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        """Record that an optimizer has stepped."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name in self._reduced:
            if id(self._parameters.get(name)) in held:
                self._reduced[name] = STEPPED

    def _forget(self, _: object) -> None:
        """Let the parameters go with their model."""
        self._parameters, self._strategy = {}, None


def after_steps(watcher: object, call: Callable[..., None]) -> None:
    """Call a method of a watcher after the steps of all of torch's optimizers, as long as the watcher lives."""
    method = weakref.WeakMethod(call)
    hook = register_optimizer_step_post_hook(lambda *args: (held := method()) and held(*args))
    weakref.finalize(watcher, hook.remove)


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


def check_reducer(reducer: object) -> None:
    """Check that a reducer is one, and not the compressor that it is made of.

    Raises:
        BadInput: If it is not.
    """
    if not isinstance(reducer, Reducer):
        raise BadInput(
            f"invalid reducer {reducer!r}: build one, such as gradwire.comm.collectives.Reducer('int8'); or use "
            f"gradwire.compress_gradients(model, 'int8')."
        )


def check_unprepared(model: nn.Module, *wrappers: type) -> None:
    """Check that `comm.parallel.wrap` has prepared no part of a model: its reducer would average a second time.

    Args:
        model: The model.
        wrappers: Frameworks' wrappers, which may be prepared.

    Raises:
        BadInput: If it has, or an optimizer that communicates has the model, whose gradients are never averaged then.
    """
    for module in filter(is_prepared, model.modules()):
        if not strategy_of(module).averages:
            raise BadInput(
                f"an optimizer that communicates, such as DiLoCo, has this {type(module).__name__} already: it "
                f"averages what its steps change, and gradients never. Give the compressor to the optimizer, as "
                f"DiLoCo(…, compressor='int8'), or build and wrap the model again without it."
            )
        if not isinstance(module, wrappers):
            raise BadInput(
                f"{type(module).__name__} is prepared already, by gradwire.comm.parallel.wrap with strategy "
                f"{strategy_of(module).name}: pass a model that is not."
            )


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
