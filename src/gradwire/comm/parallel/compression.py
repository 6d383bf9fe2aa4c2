"""Compressed gradients for a model that a framework has wrapped: one call, and the training loop does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.base.errors import BadInput
from gradwire.base.units import amount
from gradwire.comm.collectives import Reducer, state
from gradwire.comm.collectives.meter import Traffic
from gradwire.comm.collectives.ops import Group, new_group, ranks_of
from gradwire.comm.collectives.reducer import Given, StepEnd, check_options
from gradwire.comm.parallel.checks import check_agreement, check_gradients, parameters_of
from gradwire.comm.parallel.model import COMPILED, local, named_parameters, trainable_shapes
from gradwire.comm.parallel.strategies.ddp import DDP
from gradwire.comm.parallel.strategies.fsdp2 import (
    FSDP2,
    CompressedParameters,
    check_gathered,
    check_sharded,
    compress_parameters,
    groups_of,
)
from gradwire.comm.parallel.strategy import (
    HOOKED,
    Completeness,
    Strategy,
    check_reducer,
    check_unprepared,
    in_backward,
)
from gradwire.comm.reduction import encoding_of
from gradwire.comm.torch_internals import (
    ParameterGroup,
    allocating,
    has_comm_hook,
    has_step_hooks,
    timeout_of,
    version_of,
)

WRAPPERS: dict[type, type[Strategy]] = {DistributedDataParallel: DDP, FSDPModule: FSDP2}


@torch.inference_mode(False)  # later steps change what it allocates
def compress_gradients(
    model: nn.Module,
    compressor: Given,
    *,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    error_feedback: bool = False,
    inside: Given | None = None,
    parameters: str | None = None,
    **options: Any,
) -> Compression:
    """Average the gradients of a model through a compressor, from its next backward pass on.

    Gradients are averaged during ``backward``, once, and ``.grad`` holds the mean as usual. Accumulate with the
    framework's `no_sync` or `set_requires_gradient_sync`, and clip after the backward pass. With one rank nothing is
    encoded or sent.

    A model may be sharded over a mesh of several dimensions. The compressor averages over the data-parallel ones and
    leaves tensor, pipeline and expert parallelism alone: a tensor that is encoded is this rank's part. Where FSDP2
    averages between islands of ranks that shard a model each (HSDP), the compressor does that, over the slow links.

    Args:
        model: A `DistributedDataParallel` without a communication hook, or the root of an FSDP2 model (`fully_shard`
            or `replicate`), over any mesh; before its first forward pass. Each part of a pipeline has a compression.
        compressor: A compressor such as ``gradwire.Int8(block=128)``, its name, or a mapping of its ``method`` and
            options, as a cell of an experiment has it.
        optimizer: The optimizer or optimizers of the model. Their ``step`` ends the step of the compressor, so nothing
            is left to call; if a gradient was not reduced, it raises on all ranks, before the ranks with such a
            gradient use it. None: call `Compression.finish` once per optimizer step.
        error_feedback: Whether each rank keeps what its encodings lost, and adds it to its next gradient.
        inside: The compressor inside islands (HSDP), over the ranks that shard a model; None: FSDP2 averages there.
        parameters: Encoding of FSDP2's all-gathers of parameters, such as ``int8`` or ``int4-diff``, a key of
            `gradwire.comm.reduction.ENCODINGS`; None sends them as they are. ``int4-diff`` sends
            the differences of each optimizer step once, and needs ``optimizer``.
        options: Other options of `Reducer`, such as ``dense_steps``, ``schedule`` and ``exempt``. ``nonfinite`` is
            ``propagate``, as for `comm_hook`: a NaN or infinity of one rank reaches the gradients of all, where
            clipping or a gradient scaler meets it. ``raise`` ends the run on all ranks.

    Returns:
        The compression: its bytes, and its state for checkpoints.

    Raises:
        BadInput: If the compressor or an option is unknown or invalid, the model is none of these or has a compressor
            already, its gradients are sparse or complex, an optimizer has no parameter of it, ``nonfinite`` is ``skip``
            although the optimizer steps by itself, or ranks differ.
    """
    if isinstance(optimizer, Optimizer) or not isinstance(optimizer, Iterable):
        optimizer = [] if optimizer is None else [optimizer]
    given = [*optimizer]
    if given and options.get("nonfinite") == "skip":
        raise BadInput(
            "nonfinite is 'skip', but a step that an optimizer has begun cannot be skipped: pass no optimizer, and "
            "step only if compression.finish() returns True; or use 'propagate' with torch.amp.GradScaler."
        )
    model = getattr(model, COMPILED, model)
    wrapper_of(model)
    optimizers = [steps_of(optimizer, model) for optimizer in given]
    encoding = None if parameters in (None, "none") else encoding_of(parameters)
    if encoding is not None and isinstance(model, DistributedDataParallel):
        raise BadInput(f"parameters is {parameters!r}, but DistributedDataParallel sends none: omit it.")
    if encoding is not None and encoding.differences and not optimizers:
        raise BadInput(f"parameters is {parameters!r}, which sends what an optimizer changed: pass optimizer.")
    if encoding is not None:
        check_gathered(model, str(parameters))
    options = {"error_feedback": error_feedback, "nonfinite": "propagate", **options}
    for given_compressor in (compressor, inside):
        if given_compressor is not None:
            check_options(given_compressor, **options)
    reducer = reducer_of(model, compressor, inside, options)
    watch = hook(model, reducer)
    compression = Compression(model, reducer, watch)
    for stepping in optimizers:
        compression.end_with(stepping)
    if encoding is not None:
        compression.parameters = compress_parameters(model, str(parameters), Moves(optimizers).unchanged)
    return compression


def hook(wrapped: nn.Module, reducer: Reducer) -> Completeness | None:
    """Attach a reducer to a model wrapped with DDP or ``fully_shard``, before its first forward pass.

    Use the framework as usual: accumulate with its `no_sync` or `set_requires_gradient_sync`, and clip after the
    backward pass. Call ``reducer.finish()`` once per optimizer step. With one rank this does nothing.

    Args:
        wrapped: A `DistributedDataParallel` without a communication hook, or the root of an FSDP2 model.
        reducer: Averages the gradients; it, or a part of it, must be over the ranks of each dimension of the model's
            mesh that is reduced.

    Returns:
        What `finish` compares the gradients with; None with one rank.

    Raises:
        BadInput: For another model or group, a model that has a reducer, a reducer that has averaged another model, or
            gradients that are sparse or complex; if ranks differ in the model or the reducer; or if this version of
            torch does not support the reducer.
    """
    check_reducer(reducer)
    wrapped = getattr(wrapped, COMPILED, wrapped)  # torch.compile's module calls the one that it holds
    kind = wrapper_of(wrapped)
    check_unprepared(wrapped, *WRAPPERS)
    check_gradients(wrapped)
    check_ranks(wrapped, reducer)
    check_agreement(reducer.everyone, reducer, parameters_of(wrapped), strategy=kind.name)
    device = next(wrapped.parameters()).device
    return kind.build(reducer, device).install(wrapped, reducer, trainable_shapes(wrapped))


def wrapper_of(wrapped: nn.Module) -> type[Strategy]:
    """Return the strategy of a model that DDP or FSDP2 has wrapped, and that has no reducer.

    Raises:
        BadInput: For another model, or one that has a reducer or a communication hook.
    """
    if wrapped in HOOKED:
        raise BadInput("the model has a reducer already: build and wrap the model again to use another one.")
    if isinstance(wrapped, DistributedDataParallel) and has_comm_hook(wrapped):
        raise BadInput(
            "the model has a communication hook already, and DistributedDataParallel takes one: do not register it, or "
            "build DistributedDataParallel again."
        )
    for framework, kind in WRAPPERS.items():
        if isinstance(wrapped, framework):
            return kind
    raise BadInput(
        f"{type(wrapped).__name__} is neither a DistributedDataParallel nor an FSDP2 model: wrap it with "
        f"DistributedDataParallel or fully_shard first."
    )


def check_ranks(wrapped: nn.Module, reducer: Reducer) -> None:
    """Check that the reducer averages over exactly the ranks that DDP or FSDP2 averages over.

    Raises:
        BadInput: If it does not.
    """
    check_sharded(wrapped, reducer)
    if isinstance(wrapped, DistributedDataParallel):
        ranks, reduced = ranks_of(wrapped.process_group), ranks_of(reducer.group)
        if ranks != reduced:
            raise BadInput(
                f"the model averages its gradients over ranks {ranks} and the reducer over {reduced}: pass Reducer the "
                f"process group that the model was wrapped with."
            )


# Why: docs/decisions.md, "One call, and a step that ends itself".
class Compression:
    """The compression of a model's gradients, from `compress_gradients`; a torch `Stateful`.

    Attributes:
        reducer: Averages the gradients.
        parameters: The replacement of FSDP2's all-gathers, and the replicas that ranks compute with under
            ``int4-diff``.
    """

    def __init__(self, model: nn.Module, reducer: Reducer, watch: Completeness | None) -> None:
        self.reducer = reducer
        self.parameters = CompressedParameters()
        self._model = ref(model)
        self._watch = watch  # knows what was reduced since the last step; None with one rank
        self._stepped = WeakSet[Optimizer]()  # optimizers whose next step must end a step
        self._stepping = WeakSet[Optimizer]()  # optimizers in their step
        self._ending: StepEnd | None = None  # a step whose agreement runs while an optimizer computes

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse to be copied or pickled.

        Raises:
            BadInput: A compression is of one model and its optimizers.
        """
        raise BadInput(
            "a compression belongs to its model and cannot be copied or pickled: save its state_dict(), and call "
            "gradwire.compress_gradients for the copy of the model."
        )

    def __repr__(self) -> str:
        """The method, ranks, bytes sent, ratio, error feedback and steps."""
        reducer, traffic = self.reducer, self.traffic
        ratio = f", {traffic['ratio']:.1f} times fewer" if traffic["ratio"] else ""
        feedback = "with" if reducer.codec.options.feedback else "without"
        return (
            f"<{reducer.compressor.name} over {amount(reducer.world, 'rank')} {feedback} error feedback: "
            f"{traffic['sent']:,} of {traffic['raw']:,} bytes sent{ratio}, in {amount(self.step, 'step')}>"
        )

    @property
    def traffic(self) -> Traffic:
        """This rank's traffic since the start; ``details["parameters"]`` has the bytes of compressed all-gathers."""
        traffic = self.reducer.traffic
        traffic.details["parameters"] = self.parameters.traffic
        return traffic

    @property
    def step(self) -> int:
        """Optimizer steps finished."""
        return self.reducer.step

    @property
    def loss_scale(self) -> float:
        """The factor of the present step's loss; set it before the backward pass if a gradient scaler changes it."""
        return self.reducer.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.reducer.loss_scale = scale

    def finish(self, total: Tensor | None = None) -> bool:
        """End the step, after the backward pass, on every rank; with an optimizer its ``step`` does.

        Args:
            total: A float32 vector, such as a loss, that is summed over the ranks in place, in the same message.

        Returns:
            Whether to take the optimizer step: False only with ``nonfinite="skip"``, if any rank met a value that is
            not finite.

        Raises:
            BadInput: If ``total`` is no vector.
            NonFiniteGradient: On all ranks, with ``nonfinite="raise"``.
            RunFault: If nothing was reduced, or on any rank a parameter has a gradient that was not.
        """
        self._begin_finish(total)
        return self._end()

    # Why: docs/decisions.md, "The ranks agree while the optimizer computes".
    def _begin_finish(self, total: Tensor | None = None) -> None:
        """End the step, and begin to agree."""
        self._end()
        self._stepped.clear()
        self._ending = self.reducer.begin_finish(total)

    def _end(self) -> bool:
        """Wait until the ranks agree on the last step; return whether to take the optimizer step."""
        ending, self._ending = self._ending, None
        return ending is None or ending.wait()

    def end_with(self, optimizer: Optimizer) -> None:
        """Have the ``step`` of an optimizer end the step.

        The first of several optimizers ends it. Where a closure is passed, each of its evaluations is a step.
        """
        self._stepped.add(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Finish, unless another optimizer has for the same backward pass; with a closure, after each evaluation."""
        closure = kwargs["closure"] if "closure" in kwargs else args[1] if len(args) > 1 else None
        if closure is not None:
            self._stepped.add(optimizer)
            evaluated = partial(self._evaluated, closure)
            if "closure" in kwargs:
                return args, {**kwargs, "closure": evaluated}
            return (args[0], evaluated, *args[2:]), kwargs
        reduced = self._watch is not None and self._watch.reduced
        nested = optimizer in self._stepping and not reduced  # a subclass calls its base's step, which has hooks too
        if not allocating() and not nested:
            if reduced or optimizer in self._stepped:
                self._begin_finish()
                assert self._ending is not None
                at_once = self.reducer.nonfinite == "raise" or self._ending.at_once
                if at_once or not computes_alone(optimizer):
                    self._end()  # before the optimizer uses this rank's gradients, or communicates
            self._stepped.add(optimizer)
            self._stepping.add(optimizer)
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Wait until the ranks agree."""
        self._stepping.discard(optimizer)
        self._end()

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        """Evaluate an optimizer's closure, and finish."""
        loss = closure()
        self.finish()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Residuals, compressor states, generators and replicas of this rank; tensors are not copies.

        Every rank saves and loads its own, or passes the compression to `torch.distributed.checkpoint`.
        """
        rows = {name: replica.row for name, replica in self.parameters.replicas.items()}
        reduced = self.reducer.state_dict()
        return state.extended(reduced, {"replicas": rows}) if rows else reduced

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, after the model; a resumed run then equals an unbroken one.

        Replicas that it lacks, as of another number of ranks, start from the exact parameters.

        Raises:
            BadInput: As `Reducer.load_state_dict`, or if replicas are of another model.
        """
        part = state.taken(state_dict, self.reducer.codec.rank, self.reducer.topology, "a compression").part or {}
        rows, model, replicas = part.get("replicas"), self._model(), self.parameters.replicas
        if rows is not None:
            state.check_tensors(rows, {name: replica.row for name, replica in replicas.items()}, "replicas")
        self.reducer.load_state_dict(state_dict)
        for name, replica in replicas.items() if model is not None else ():
            if rows is not None:
                replica.restore(rows[name])
            else:
                replica.reset({name: local(parameter) for name, parameter in named_parameters(model)})


# Why: docs/decisions.md, "`int4-diff` sends differences once per optimizer step".
class Moves:
    """Whether the parameters of a group have moved.

    An optimizer may move them without a trace in autograd's version counters, and other code without an optimizer.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.steps = 0
        self.seen = WeakKeyDictionary[ParameterGroup, object]()
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._count)

    def unchanged(self, group: ParameterGroup) -> bool:
        """Whether a group's parameters are those of the call before; in a backward pass they are."""
        if in_backward():
            return True
        versions = [version_of(parameter) for parameter in group.parameters.values()]
        before, self.seen[group] = self.seen.get(group), (self.steps, versions)
        return before == self.seen[group]

    def _count(self, *_: object) -> None:
        self.steps += 1


def computes_alone(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known not to communicate: one of `torch.optim`, of plain tensors.

    While another one communicates in its step, a rank that reports a fault would take part in the wrong collective.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return type(optimizer).__module__.startswith("torch.optim.") and not any(isinstance(p, DTensor) for p in parameters)


def steps_of(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Return the optimizer whose ``step`` has hooks: the given one, or the one inside, as of Accelerate's optimizers.

    Raises:
        BadInput: If there is none, or it moves no parameter of the model, as one that was built before `fully_shard`
            replaced the parameters.
    """
    while isinstance(optimizer, Optimizer) and not has_step_hooks(optimizer):
        optimizer = getattr(optimizer, "optimizer", None)  # type: ignore[assignment]
    if not isinstance(optimizer, Optimizer):
        raise BadInput(
            f"optimizer is {type(optimizer).__name__}, not a torch.optim.Optimizer with step hooks: pass the optimizer "
            f"that moves the parameters."
        )
    moved = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if moved.isdisjoint(parameter for _, parameter in named_parameters(model)):
        raise BadInput(
            f"{type(optimizer).__name__} has no parameter of the model: build it from model.parameters() after the "
            f"model is wrapped or sharded."
        )
    return optimizer


# Why: docs/decisions.md, "A mesh has one reducer per dimension that is averaged".
def reducer_of(
    model: nn.Module, compressor: Given, inside: Given | None = None, options: Mapping[str, Any] = MappingProxyType({})
) -> Reducer:
    """Build the reducer over the ranks that DDP or FSDP2 averages a model's gradients over.

    Where those differ between parameters, as of experts, or gradients are also compressed inside islands, it has parts.

    Args:
        model: The wrapped model.
        compressor: The compressor of a mean over replicas, or over shards without replicas.
        inside: The compressor of a mean over the shards of a model with replicas; None: FSDP2 averages those.
        options: The other options of `Reducer`.

    Raises:
        BadInput: As `Reducer`, or if ``inside`` is given and no dimension is inside of an island.
    """
    if isinstance(model, DistributedDataParallel):
        groups, levels = [], {"": Level(model.process_group, compressor)}
    else:
        groups = groups_of(model)
        levels = levels_of(groups, compressor, inside)
    if inside is not None and "inside" not in levels:
        raise BadInput("inside is the compressor inside islands of ranks, and the model has none: omit it.")
    if options.get("granularity") == "row" and any(group.split for group in groups):
        raise BadInput(
            "granularity row encodes all parameters of a rank together, those that tensor parallelism splits and those "
            "that its peers have in common, which would no longer be equal: omit it."
        )
    compressed = {name: level for name, level in levels.items() if level.compressor is not None}
    draws = data_parallel_rank(groups[0]) if groups else None
    reducers = {
        name: Reducer(level.compressor or "none", level.ranks, draws=draws, **options)
        for name, level in compressed.items()
    }
    if not reducers:  # a single data-parallel rank
        return Reducer(compressor, groups[0].shards or groups[0].replicas, **options)
    first, *others = reducers
    reducer = reducers[first]
    for name in others:
        reducer.join(name, reducers[name])
    if groups:
        reducer.everyone = spanned(model, reducer.group)
    if len(levels) > 1:
        reducer.topology = " x ".join(str(level.ranks.size()) for level in levels.values())
    return reducer


class Level(NamedTuple):
    """Ranks over which gradients are averaged.

    Attributes:
        ranks: The ranks.
        compressor: The compressor; None: the framework averages.
    """

    ranks: dist.ProcessGroup
    compressor: Given | None


def levels_of(groups: Iterable[ParameterGroup], compressor: Given, inside: Given | None) -> dict[str, Level]:
    """Return the levels of an FSDP2 model by name, each of several ranks; ``inside`` is the last.

    Raises:
        BadInput: If ``inside`` is needed to decide how to compress a level.
    """
    by_ranks: dict[tuple[int, ...], tuple[str, Level]] = {}
    islands: dict[tuple[int, ...], tuple[str, Level]] = {}  # their shards
    for group in groups:
        replicas, shards = (ranks if ranks and ranks.size() > 1 else None for ranks in (group.replicas, group.shards))
        if replicas is not None:
            by_ranks[tuple(ranks_of(replicas))] = group.replicas_name, Level(replicas, compressor)
        if shards is not None and replicas is not None:
            islands[tuple(ranks_of(shards))] = "inside", Level(shards, inside)
        elif shards is not None:
            by_ranks[tuple(ranks_of(shards))] = group.shards_name, Level(shards, compressor)
    if inside is None and (both := by_ranks.keys() & islands.keys()):
        raise BadInput(
            f"ranks {min(both)} shard some parameters with replicas on other ranks and some without, so that their "
            f"links are both inside an island and not: pass inside, the compressor of both."
        )
    levels: dict[str, Level] = {}
    for name, level in {**by_ranks, **islands}.values():
        levels[name if name not in levels else f"{name} of {level.ranks.size()}"] = level
    return levels


def data_parallel_rank(group: ParameterGroup) -> int:
    """Return this rank's number among those that average a group's gradients: by replicas, then by shards."""
    shard, size = (0, 1) if group.shards is None else (group.shards.rank(), group.shards.size())
    return shard if group.replicas is None else group.replicas.rank() * size + shard


def spanned(model: nn.Module, group: Group) -> Group:
    """Return the ranks of a model's mesh, those of tensor parallelism included, which have to step alike.

    Args:
        model: The sharded model.
        group: The ranks over which its gradients are averaged.
    """
    meshes = {id(p.device_mesh): p.device_mesh for _, p in named_parameters(model) if isinstance(p, DTensor)}
    mesh = max(meshes.values(), key=lambda mesh: mesh.size())
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        return None
    if ranks == ranks_of(group):
        return group
    return new_group(ranks, mesh.get_all_groups(), timeout=timeout_of(group))
