"""Base of the optimizers that communicate: ``step`` averages over the ranks, then moves the parameters."""

from __future__ import annotations

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.base.errors import BadInput, listed
from gradwire.base.flags import NOT_NEGATIVE
from gradwire.base.strict import Strict, checked
from gradwire.base.units import amount
from gradwire.comm.collectives import IslandReducer, Islands, Reducer, build_islands, ops, state
from gradwire.comm.collectives.meter import Traffic
from gradwire.comm.collectives.ops import Shared
from gradwire.comm.collectives.reducer import check_options
from gradwire.comm.compressors import as_compressor
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.parallel.checks import check_agreement, check_gradients, parameters_of, warn_of_statistics
from gradwire.comm.parallel.model import COMPILED, trainable
from gradwire.comm.parallel.strategies.ddp import DDP
from gradwire.comm.parallel.strategies.fsdp2 import groups_of
from gradwire.comm.parallel.strategies.hsdp import HSDP
from gradwire.comm.parallel.strategy import HOOKED, Strategy, attach, is_prepared, strategy_of
from gradwire.comm.parallel.wrap import wrap
from gradwire.comm.torch_internals import allocating, cloned, has_comm_hook

ALIKE, LOCAL_STEP = "alike", "local"  # kinds of steps: where all communicate alike; where nothing is sent
NEWEST: WeakKeyDictionary[nn.Module, ref[Communicating]] = WeakKeyDictionary()  # the optimizer that moves a model
TORCH = ("state", "param_groups")  # entries of the state of every torch optimizer

Beta = Annotated[float, Field(ge=0, lt=1)]
AnyCompressor = Compressor | str | Mapping[str, Any]
"""A compressor, its name, or a mapping of its ``method`` and options."""


# Why: docs/decisions.md, "Optimizers that communicate own the reducer, and have a plain step".
class Communicating(Optimizer):
    """An optimizer whose ``step`` communicates, so that every rank must call it.

    Its ``state_dict`` holds all that a rank needs to resume, except the model's: the state of a torch optimizer, the
    reducer's, and what this rank keeps of its rounds. Every rank saves and loads its own, or passes the optimizer to
    `torch.distributed.checkpoint`.

    Attributes:
        model: The model.
        reducer: The reducer.
        parameters: The trainable parameters, by name.
        max_norm: Maximum Euclidean norm of the gradient; larger ones are clipped.
    """

    model: nn.Module
    reducer: Reducer
    parameters: dict[str, nn.Parameter]
    max_norm: float = math.inf
    _taken: bool | None = None  # whether `communicate` had the present step taken; None before it
    # A GradScaler would leave out `step` on the ranks with an infinity; so it calls `step`, which refuses it.
    _step_supports_amp_scaling = True

    def attach(
        self,
        model: nn.Module,
        compressor: AnyCompressor,
        reducer: Reducer | None,
        options: Mapping[str, Any],
        **settings: Any,
    ) -> None:
        """Prepare the model so that its ranks train apart, and the reducer; called once, after the groups are set.

        Args:
            model: As for the optimizer.
            compressor: As for the optimizer.
            reducer: A reducer of the benchmark or the user; None builds one from ``compressor`` and ``options``.
            options: Options of `Reducer`; ``error_feedback`` defaults to True.
            settings: The values that must be equal on all ranks, by name.

        Raises:
            BadInput: If gradients of the model are averaged already, no rank or island holds a whole model, the groups
                hold other parameters than it, ranks differ, or the reducer has averaged another model.
        """
        name = type(self).__name__
        if not isinstance(model, nn.Module):
            raise BadInput(f"{name} takes the model, an nn.Module, as its second argument, not {type(model).__name__}.")
        if reducer is not None and options:
            raise BadInput(f"{name} has a reducer and options of one ({', '.join(options)}): give one of them.")
        if reducer is None:
            check_options(compressor := as_compressor(compressor), **options)
        model = getattr(model, COMPILED, model)  # torch.compile's module calls the one that it holds
        if reducer is None or not is_prepared(model):
            model, reducer = _apart(model, compressor, reducer, {"error_feedback": True, **options}, name)
            check_agreement(reducer.everyone, reducer, parameters_of(model), optimizer=name, **settings)
        if strategy_of(model).averages:
            raise BadInput(
                f"{name} averages over the ranks itself, and gradients of this model are averaged already: wrap it "
                f"with average=False."
            )
        parameters = trainable(model)
        grouped = {p for group in self.param_groups for p in group["params"] if p.requires_grad}
        if lacking := [name for name, p in parameters.items() if p not in grouped]:
            raise BadInput(f"{parameters_are(lacking)} in no parameter group: add them, or freeze them before wrap.")
        if len(grouped) > len(parameters):
            raise BadInput(
                f"the parameter groups hold {len(grouped) - len(parameters)} parameters that the model does not have: "
                f"take them from the model after it is wrapped or sharded."
            )
        reducer.claim(parameters)
        NEWEST[model] = ref(self)
        self.model, self.reducer, self.parameters = model, reducer, parameters
        if reducer.world > 1:
            numel = sum(p.numel() for p in parameters.values())
            reducer.prepare("all_reduce", numel, strategy_of(model).device)
        reducer.codec.check_names(parameters)

    # Why: docs/decisions.md, "A copy of an optimizer that communicates".
    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles: all but hooks, as of torch's optimizers, and how the model is prepared.

        Raises:
            BadInput: If the model is sharded, or its groups change: only a ``state_dict`` fits then.
        """
        strategy = strategy_of(self.model)
        if isinstance(strategy, HSDP) or type(self.reducer) is not Reducer:
            raise BadInput(
                f"{type(self).__name__} of a sharded model or with a manager cannot be copied or pickled: save the "
                f"state_dict() of the model and of the optimizer."
            )
        kept = {name: value for name, value in vars(self).items() if name != "step" and "_hooks" not in name}
        prepared = type(strategy), Shared(strategy.group), strategy.device
        return {**kept, "prepared": prepared, "newest": self._newest() is self}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, and prepare its model as the original's."""
        kept = {**state}
        prepared, newest = kept.pop("prepared", None), kept.pop("newest", False)
        super().__setstate__(kept)
        if prepared is not None:
            kind, shared, device = prepared
            _keep_apart(self.model, kind(shared.group, device))
            if newest:  # an older one may be copied before it
                NEWEST.setdefault(self.model, ref(self))
            self.bind()

    def _newest(self) -> Communicating | None:
        """Return the optimizer that was built last for the model; None if it no longer exists."""
        newest = NEWEST.get(self.model)
        return None if newest is None else newest()

    def bind(self) -> None:
        """Refer to the memory of this rank's parts of parameters."""

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent, as `Reducer.traffic`."""
        return self.reducer.traffic

    @property
    def in_step(self) -> bool:
        """Whether parameters are currently equal on all ranks."""
        return True

    @property
    def dense_steps(self) -> int:
        """Number of first steps in which everything travels as float32."""
        return 0

    def kind(self, step: int) -> str:
        """The kind of an optimizer step after the dense ones, counted from 0: steps of a kind communicate alike."""
        return ALIKE

    @property
    def outer_bytes(self) -> int | None:
        """Memory of what this rank keeps of its rounds, such as anchors; None without rounds."""
        return None

    def synchronized(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are those that all ranks share, to evaluate or save them."""
        return nullcontext()

    def restart(self) -> None:
        """Begin a round at the present parameters, which were loaded without a `rank_state`."""

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        """Yield by name what else is equal on all ranks after every step."""
        yield from ()

    @abstractmethod
    def average(self, max_norm: float, total: Tensor | None) -> tuple[float, bool]:
        """Do what `communicate` does."""

    @abstractmethod
    def move(self) -> None:
        """Move the parameters by the outcome of `average`; sends nothing."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Average over the ranks, and move the parameters unless the reducer's ``nonfinite`` skips the step.

        Every rank must call it equally often. Clear the gradients afterwards.

        Args:
            closure: Computes the loss and this rank's gradients; called first, once.

        Returns:
            The closure's loss; None without one.

        Raises:
            BadInput: As `communicate`, or in a step of a `GradScaler`.
            NonFiniteGradient: As `Reducer.finish`.
            RunFault: As `communicate`.
        """
        if getattr(self, "found_inf", None) is not None:
            raise BadInput(
                f"{type(self).__name__} does not support GradScaler, which would skip a step on some ranks: train in "
                f"bf16, and give nonfinite='skip' to skip steps on all ranks."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._taken is None and not allocating():
            self.communicate(self.max_norm)
        taken, self._taken = self._taken, None
        if taken is not False:
            self.move()
        return loss

    @torch.no_grad()
    def communicate(self, max_norm: float, total: Tensor | None = None) -> tuple[float, bool]:
        """Average over the ranks for the next ``step``, which then only moves, and finish the reducer's step.

        For a training loop that needs the norm; ``step`` calls it otherwise.

        Args:
            max_norm: Maximum Euclidean norm of the gradient; larger ones are clipped.
            total: A tensor that `Reducer.finish` sums in the same message.

        Returns:
            The gradient's norm before clipping, equal on every rank, and whether ``step`` will move the parameters
            (from `Reducer.finish`).

        Raises:
            BadInput: If another optimizer was built for the model since, the model's trainable parameters are not those
                that this one was built with, or a gradient is sparse.
            NonFiniteGradient: As `Reducer.finish`.
            RunFault: If a parameter that this optimizer sends has no gradient.
        """
        newest = self._newest()
        if newest is not None and newest is not self:
            raise BadInput(
                f"a {type(newest).__name__} was built for the model of this {type(self).__name__} afterwards, and both "
                f"would move it: step the new one only, or delete it."
            )
        if changed := [name for name, p in trainable(self.model).items() if self.parameters.get(name) is not p]:
            raise BadInput(
                f"{parameters_are(changed)} unfrozen or replaced after {type(self).__name__} was built, which would "
                f"never average them: wrap the model and build the optimizer again."
            )
        sparse = [name for name, p in self.parameters.items() if p.grad is not None and p.grad.layout != torch.strided]
        if sparse:
            raise BadInput(
                f"{type(self).__name__} takes dense gradients, and {sparse[0]} has a sparse one: use sparse=False "
                f"where the model reads it, and an optimizer of dense gradients."
            )
        self._taken = None
        norm, self._taken = self.average(max_norm, total)
        return norm, self._taken

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do when they are built.

        Raises:
            BadInput: Afterwards: the parameters that the ranks average are fixed.
        """
        if hasattr(self, "parameters"):
            raise BadInput(
                f"{type(self).__name__} cannot add parameters after it was built, because the ranks would never "
                f"average them: unfreeze them before wrap, and build the optimizer with all groups."
            )
        super().add_param_group(param_group)

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank keeps in addition to torch's state, the reducer's state included; no copies.

        It has the form of `comm.collectives.state`. ``state_dict`` holds it; a framework that stores torch's part by
        itself (`torch.distributed.checkpoint.state_dict.get_state_dict`) needs it separately.
        """
        reducer = self.reducer
        kept = {"reducer": reducer.state_dict(), **self.round_state()}
        return state.stored(reducer.codec.rank, reducer.step, reducer.topology, kept)

    def load_rank_state(self, rank_state: Mapping[str, Any]) -> None:
        """Load a `rank_state` of the same rank, after parameters and torch's state are loaded.

        Of another number of ranks only the step counts: a round begins at the present parameters, with a warning.

        Raises:
            BadInput: If it is no such state, another rank's, or of another model or reducer; nothing has changed.
        """
        whose = f"{type(self).__name__}"
        step, topology, saved = state.taken(rank_state, self.reducer.codec.rank, self.reducer.topology, whose)
        if saved is None:
            warnings.warn(
                f"the optimizer's state is of {topology} ranks and this run has {self.reducer.topology}: a round "
                f"begins, and residuals, compressor states and generators are reset",
                stacklevel=2,
            )
            self.reducer.begin(step)
            self.restart()
            return
        state.check_keys(saved, {"reducer"}, whose)
        self.check_round_state(saved)
        self.reducer.load_state_dict(saved["reducer"])
        self.reducer.codec.check_names(self.parameters)
        self.load_round_state(saved)
        self._taken = None

    def round_state(self) -> dict[str, Any]:
        """Return what this rank keeps of its rounds: tensors, not copies, and plain data."""
        return {}

    def check_round_state(self, saved: Mapping[str, Any]) -> None:
        """Check what `load_round_state` is given.

        Raises:
            BadInput: If names or shapes differ.
        """

    def load_round_state(self, saved: Mapping[str, Any]) -> None:
        """Copy what `round_state` returned."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a torch optimizer, and with it this rank's `rank_state`."""
        return {**super().state_dict(), **self.rank_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` of the same rank, after the model's; tensors are copied.

        One of torch's own optimizer, without a `rank_state`, sets moments and groups.

        Raises:
            BadInput: As `load_rank_state`, or if moments are of another optimizer.
        """
        state.check_keys(state_dict, set(TORCH), type(self).__name__)
        rank_state = {key: value for key, value in state_dict.items() if key not in TORCH}
        self.load_torch_state({key: state_dict[key] for key in TORCH})
        if rank_state:
            self.load_rank_state(rank_state)

    def load_torch_state(self, state_dict: dict[str, Any]) -> None:
        """Load the part of a state that torch's optimizers have."""
        super().load_state_dict(state_dict)
        copy_tensors(self.state)

    def finish(self, norm: float, total: Tensor | None, *, wait: bool = True) -> tuple[float, bool]:
        """Finish the reducer's step, for an `average` in which every rank clips its own gradient.

        Args:
            norm: This rank's norm; one that is not finite sets the reducer's flag.
            total: As for `communicate`.
            wait: As for `Reducer.finish`.

        Returns:
            As `communicate`; the norm is the root mean square over the ranks.
        """
        group, device = strategy_of(self.model).group, strategy_of(self.model).device
        if not math.isfinite(norm):
            self.reducer.codec.note(torch.ones(1, dtype=torch.uint8, device=device))
        square = torch.tensor([norm**2], dtype=torch.float32, device=device)
        sums = square if total is None else torch.cat([total, square])
        taken = self.reducer.finish(sums, wait=wait)
        if total is not None:
            total.copy_(sums[:-1])
        return (sums[-1] / dist.get_world_size(group)).sqrt().item(), taken


def _apart(
    model: nn.Module, compressor: AnyCompressor, reducer: Reducer | None, options: dict[str, Any], whose: str
) -> tuple[nn.Module, Reducer]:
    """Prepare a model so that its gradients are never averaged over all ranks, and build its reducer.

    Returns:
        The model, with a strategy, and the reducer.

    Raises:
        BadInput: If the model is sharded over all ranks, or averages its gradients in another way.
    """
    if is_prepared(model):
        return model, _reducer(strategy_of(model), compressor, options)
    if model in HOOKED:
        raise BadInput(
            f"the model has a reducer already, and {whose} averages what its steps change: leave compress_gradients "
            f"out, and give {whose} the compressor."
        )
    device = next(model.parameters()).device
    strategy: Strategy
    if isinstance(model, DistributedDataParallel):
        if has_comm_hook(model):
            raise BadInput(f"the model has a communication hook, which {whose} would never call: leave it out.")
        strategy = DDP(model.process_group, device)
    elif isinstance(model, FullyShardedDataParallel):
        raise BadInput(f"{whose} needs each rank's or island's whole gradient, and FullyShardedDataParallel shards it.")
    elif isinstance(model, FSDPModule):
        strategy = HSDP(None, device, islands=_islands(model, whose))
    else:
        reducer = reducer or Reducer(compressor, **options)
        return wrap(model, "naive", reducer, average=False), reducer
    check_gradients(model)
    reducer = reducer or _reducer(strategy, compressor, options)
    if isinstance(strategy, HSDP) != isinstance(reducer, IslandReducer) or ops.ranks_of(
        reducer.everyone
    ) != ops.ranks_of(strategy.group):
        raise BadInput(f"the reducer of {whose} averages over other ranks than the model: leave it out.")
    _keep_apart(model, strategy)
    warn_of_statistics(model)
    return model, reducer


def _keep_apart(model: nn.Module, strategy: Strategy) -> None:
    """Attach a strategy that never averages gradients over all ranks."""
    strategy.averages = False
    attach(model, strategy)
    if not strategy.communicates:
        strategy.keep_apart(model)


def _reducer(strategy: Strategy, compressor: AnyCompressor, options: dict[str, Any]) -> Reducer:
    """Build the reducer over the ranks, or islands, that have their own gradients."""
    if isinstance(strategy, HSDP):
        return IslandReducer(compressor, strategy.islands, **options)
    return Reducer(compressor, **{"group": strategy.group, **options})


def _islands(model: FSDPModule, whose: str) -> Islands:
    """Return the islands of a sharded model; where FSDP2 averages between them (HSDP), it no longer does.

    Raises:
        BadInput: If there are no replicas, the mesh has other dimensions or not all ranks, or the ranks of an island
            are not neighbours.
    """
    assert isinstance(model, nn.Module)
    meshes = dict.fromkeys(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    groups = groups_of(model)
    levels = {(group.shards, group.replicas) for group in groups}
    inside, between = groups[0].shards, groups[0].replicas
    size = 1 if inside is None else inside.size()
    dimensions = (inside is not None) + (between is not None)
    if len(levels) > 1 or any(mesh.ndim != dimensions for mesh in meshes):
        named = dict.fromkeys(str(mesh.mesh_dim_names or tuple(mesh.shape)) for mesh in meshes)
        raise BadInput(
            f"parameters are on meshes of the dimensions {' and '.join(named)}: {whose} takes those of shards and "
            f"replicas, the same for all parameters, and no tensor or expert parallelism."
        )
    if between is None or between.size() == 1:
        raise BadInput(
            f"{whose} needs each rank's or island's whole gradient, and fully_shard has sharded the model over {size} "
            f"ranks without replicas: shard it over a mesh of islands × ranks, or use DistributedDataParallel."
        )
    (mesh, *_) = meshes
    islands = build_islands(dist.get_world_size() // size, mesh.device_type)
    if ops.ranks_of(between) != ops.ranks_of(islands.between) or (
        size > 1 and ops.ranks_of(inside) != ops.ranks_of(islands.inside)
    ):
        raise BadInput(
            f"the model's mesh is {mesh.mesh.tolist()}: {whose} takes one of all {dist.get_world_size()} ranks, "
            f"neighbouring ones in an island. For a pipeline's stage use DistributedDataParallel."
        )
    for group in groups:
        group.drop_replicas()
    return islands


def parameters_are(names: Sequence[str]) -> str:
    """Return names for a message: how many, the first ones, and ``is`` or ``are``."""
    return f"{amount(len(names), 'parameter')} ({listed(names)}) {'is' if len(names) == 1 else 'are'}"


def synchronized(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Return a context in which the model has the parameters that all ranks share, whatever the optimizer."""
    return optimizer.synchronized() if isinstance(optimizer, Communicating) else nullcontext()


def step_without_hooks(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the step of an optimizer's class without its step hooks.

    Torch wraps the ``step`` of each class that was instantiated. Where a subclass's ``step`` calls its base's, both are
    wrapped, and hooks would run twice.
    """
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


class Rates(Strict, strict=True):
    """AdamW's numbers, as given: torch names no option of a wrong type."""

    lr: Annotated[float, NOT_NEGATIVE] = 0.0
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.0, 0.0)
    eps: Annotated[float, NOT_NEGATIVE] = 0.0
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0


def check_rates(whose: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with AdamW's numbers among them as Python's, such as those of numpy; torch takes a tensor as rate.

    Raises:
        BadInput: If one is out of range or no number.
    """
    numbers = {name: given[name] for name in Rates.model_fields if name in given}
    numbers = {name: value for name, value in numbers.items() if not isinstance(value, Tensor)}
    return {**given, **checked(Rates, numbers, whose).model_dump(exclude_unset=True)}


def copy_tensors(state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Replace an optimizer's tensors by copies: torch keeps those that it loads, and would change them in place."""
    for kept in state.values():
        kept |= {key: cloned(value) for key, value in kept.items() if isinstance(value, Tensor)}


def duplicate(kept: Any) -> Any:
    """Copy a nested state of an optimizer."""
    if isinstance(kept, Tensor):
        return cloned(kept)
    if isinstance(kept, dict):
        return {key: duplicate(value) for key, value in kept.items()}
    return [*map(duplicate, kept)] if isinstance(kept, list) else copy.deepcopy(kept)
