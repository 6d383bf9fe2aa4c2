"""Optimizers that communicate: they average momenta, or the outcome of local steps, instead of gradients.

One file each; they replace AdamW where every rank, or under `hsdp` every island, holds the whole model::

    model = wrap(model, "ddp", reducer, device="cpu", average=False)
    optimizer = build("onebit_adam", model, groups, reducer, steps=900, lr=1e-3)
    norm, finite = optimizer.exchange(max_norm=1.0)  # after backward, instead of `reducer.finish()`
    if finite:
        optimizer.step()
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.base.errors import BadInput, unknown
from gradwire.base.strict import checked
from gradwire.comm.collectives import Reducer, state
from gradwire.comm.communication import PRESETS, Streaming, preset
from gradwire.comm.parallel.names import named_parameters
from gradwire.comm.parallel.optimizers.torch_step import copy_tensors
from gradwire.comm.parallel.strategy import strategy_of

TORCH = ("state", "param_groups")  # of the state of an optimizer, what torch's optimizers have
CLASSES = {  # by module
    "onebit_adam": "OneBitAdam",
    "zero_one_adam": "ZeroOneAdam",
    "diloco": "DiLoCo",
    "streaming": "StreamingDiLoCo",
    "desloc": "DesLoc",
    "demo": "DeMo",
}
NAMES = sorted({"onebit_adam", "zero_one_adam", *PRESETS})


class Communicating(Optimizer):
    """An optimizer that communicates in `exchange`, which is called before torch's ``step``.

    Its ``state_dict`` holds all that a rank needs to resume, besides the model's: the state that torch's optimizers
    have, the reducer's, and what this rank keeps of its rounds. Every rank saves and loads its own, or passes the
    optimizer to `torch.distributed.checkpoint`.

    Attributes:
        model: The model.
        reducer: The reducer.
        parameters: The parameters that are trained, by name.
    """

    model: nn.Module
    reducer: Reducer
    parameters: dict[str, nn.Parameter]
    _exchanged = False  # whether `exchange` returned True since the last `step`

    def attach(self, model: nn.Module, reducer: Reducer) -> None:
        """Take over a model and a reducer; called once, after the optimizer has its groups.

        Raises:
            BadInput: If gradients of the model are averaged already, the groups hold other parameters than it, or the
                reducer has averaged another model.
        """
        if strategy_of(model).averages:
            raise BadInput(
                f"{type(self).__name__} averages over the ranks itself, and gradients of this model are averaged "
                f"already: wrap it with average=False."
            )
        parameters = {name: p for name, p in named_parameters(model) if p.requires_grad}
        grouped = {p for group in self.param_groups for p in group["params"] if p.requires_grad}
        if lacking := [name for name, p in parameters.items() if p not in grouped]:
            raise BadInput(f"{listed(lacking)} in no parameter group: add them, or freeze them before wrap.")
        if len(grouped) > len(parameters):
            raise BadInput(
                f"the parameter groups hold {len(grouped) - len(parameters)} parameters that the model does not have: "
                f"take them from the model that wrap returned."
            )
        reducer.claim(parameters)
        self.model, self.reducer, self.parameters = model, reducer, parameters
        if reducer.world > 1:
            reducer.prepare("all_reduce", sum(p.numel() for p in parameters.values()))
        reducer.codec.check_names(parameters)

    @property
    def in_step(self) -> bool:
        """Whether parameters are currently equal on all ranks."""
        return True

    @property
    @abstractmethod
    def dense_steps(self) -> int:
        """Number of first steps in which everything travels as float32."""

    @property
    def outer_bytes(self) -> int | None:
        """Memory of what this rank keeps of its rounds, such as anchors; None without rounds."""
        return None

    def synchronized(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are those that all ranks share, for an evaluation."""
        return nullcontext()

    def restart(self) -> None:
        """Begin a round at the present parameters, which were loaded without a `rank_state`."""

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        """Yield by name what else is equal on all ranks after every step."""
        yield from ()

    @abstractmethod
    def average(self, max_norm: float, total: Tensor | None) -> tuple[float, bool]:
        """Do what `exchange` does."""

    @abstractmethod
    def move(self) -> None:
        """Do what ``step`` does."""

    @torch.no_grad()
    def exchange(self, max_norm: float, total: Tensor | None = None) -> tuple[float, bool]:
        """Average over the ranks for this optimizer step, and finish the reducer's step. Every rank must call it.

        Args:
            max_norm: Maximum Euclidean norm of the gradient; larger ones are clipped.
            total: A tensor that `Reducer.finish` sums in the same message.

        Returns:
            The gradient's norm before clipping, equal on every rank, and whether to call ``step`` (from
            `Reducer.finish`).

        Raises:
            BadInput: If the model's trainable parameters are not those that the optimizer was built with.
            NonFiniteGradient: As `Reducer.finish`.
            RunFault: If a parameter that this optimizer sends has no gradient.
        """
        changed = [
            name for name, p in named_parameters(self.model) if p.requires_grad and self.parameters.get(name) is not p
        ]
        if changed:
            raise BadInput(
                f"{listed(changed)} unfrozen or replaced after {type(self).__name__} was built, which would never "
                f"average them: wrap the model and build the optimizer again."
            )
        self._exchanged = False
        norm, self._exchanged = self.average(max_norm, total)
        return norm, self._exchanged

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move the parameters by the outcome of `exchange`; sends nothing.

        Args:
            closure: None; the loss is evaluated before `exchange`.

        Raises:
            BadInput: Without an `exchange` that returned True.
        """
        rates = [group["lr"] for group in self.param_groups]
        # torch.distributed.checkpoint allocates an optimizer's state by a step whose learning rates are 0
        if closure is not None or (not self._exchanged and any(rates)):
            raise BadInput(
                f"{type(self).__name__}.step() communicates nothing: call norm, taken = optimizer.exchange(max_norm) "
                f"after backward, then optimizer.step() without a closure if taken is True."
            )
        self._exchanged = False
        self.move()

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
        """Return what this rank keeps besides torch's state, the reducer's state included; in no case copies.

        It has the form of `comm.collectives.state`. ``state_dict`` holds it; a framework that stores torch's part by
        itself (`torch.distributed.checkpoint.state_dict.get_state_dict`) needs it separately.
        """
        reducer = self.reducer
        part = {"reducer": reducer.state_dict(), **self.round_state()}
        return state.stored(reducer.codec.rank, reducer.step, reducer.topology, part)

    def load_rank_state(self, rank_state: Mapping[str, Any]) -> None:
        """Load a `rank_state` of the same rank, after parameters and torch's state are loaded.

        Of another number of ranks only the step counts: a round begins at the present parameters, with a warning.

        Raises:
            BadInput: If it is no such state, another rank's, or of another model or reducer; nothing has changed.
        """
        whose = f"{type(self).__name__}"
        step, topology, part = state.taken(rank_state, self.reducer.codec.rank, self.reducer.topology, whose)
        if part is None:
            warnings.warn(
                f"the optimizer's state is of {topology} ranks and this run has {self.reducer.topology}: a round "
                f"begins, and residuals, compressor states and generators are reset",
                stacklevel=2,
            )
            self.reducer.begin(step)
            self.restart()
            return
        state.check_keys(part, {"reducer"}, whose)
        self.check_round_state(part)
        self.reducer.load_state_dict(part["reducer"])
        self.reducer.codec.check_names(self.parameters)
        self.load_round_state(part)
        self._exchanged = False

    def round_state(self) -> dict[str, Any]:
        """Return what this rank keeps of its rounds: tensors, not copies, and plain data."""
        return {}

    def check_round_state(self, part: Mapping[str, Any]) -> None:
        """Check what `load_round_state` is given.

        Raises:
            BadInput: If names or shapes differ.
        """

    def load_round_state(self, part: Mapping[str, Any]) -> None:
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
        """Finish the reducer's step, for an `exchange` in which every rank clips its own gradient.

        Args:
            norm: This rank's norm; one that is not finite sets the reducer's flag.
            total: As for `exchange`.
            wait: As for `Reducer.finish`.

        Returns:
            As `exchange`; the norm is the root mean square over the ranks.
        """
        group, device = strategy_of(self.model).group, strategy_of(self.model).device
        if not math.isfinite(norm):
            self.reducer.codec.note(torch.ones(1, dtype=torch.uint8, device=device))
        square = torch.tensor([norm**2], device=device)
        sums = square if total is None else torch.cat([total, square])
        taken = self.reducer.finish(sums, wait=wait)
        if total is not None:
            total.copy_(sums[:-1])
        return (sums[-1] / dist.get_world_size(group)).sqrt().item(), taken


def listed(names: Sequence[str]) -> str:
    """Return names for a message: how many, and the first ones."""
    shown = f"({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
    return f"1 parameter {shown} is" if len(names) == 1 else f"{len(names)} parameters {shown} are"


def synchronized(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Return a context in which the model has the parameters that all ranks share, whatever the optimizer."""
    return optimizer.synchronized() if isinstance(optimizer, Communicating) else nullcontext()


def available() -> list[str]:
    """Return the names of all optimizers that communicate, sorted."""
    return NAMES


def build(
    name: str, model: nn.Module, groups: Iterable[dict[str, Any]], reducer: Reducer, **options: Any
) -> Communicating:
    """Build an optimizer that communicates; only its own file is imported.

    Args:
        name: One of `available`.
        model: The model returned by `comm.parallel.wrap` with ``average=False``.
        groups: Parameter groups, as for torch's optimizers.
        reducer: Does the communication.
        options: Options of the class; those of a preset (`communication.PRESETS`) have its defaults.

    Raises:
        BadInput: If the name is unknown, or an option is out of range.
    """
    if name not in NAMES:
        raise unknown("optimizer that communicates,", name, NAMES)
    module = name
    if name in PRESETS:
        module, options = preset(name).module, {**preset(name).options, **options}
        streaming = options.pop("streaming", None)
        if streaming is not None:
            module, options["streaming"] = "streaming", checked(Streaming, streaming, "streaming")
    kind: type[Communicating] = getattr(import_module(f"{__name__}.{module}"), CLASSES[module])
    return kind(model, groups, reducer, **options)
