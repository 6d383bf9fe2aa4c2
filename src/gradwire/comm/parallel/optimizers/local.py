"""Base of local updates: every rank trains alone for a round of H steps, then the ranks communicate.

Under ``hsdp`` what is said of a rank holds for an island, whose ranks send their shards.

In a local step a rank clips its own gradient and takes a step of its own (inner) optimizer; nothing of the model's size
is sent. The step that ends a round communicates, and so does the last step of the run. Between rounds the ranks'
parameters differ; what all ranks share are the anchors, the parameters after the last round.

A value that is not finite follows the reducer's ``nonfinite``. Under ``skip`` all ranks leave out a local step, and if
it ends a round, discard the round: they return to the anchors.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Layout, Reducer, state
from gradwire.comm.parallel.mesh import local
from gradwire.comm.parallel.optimizers import Communicating
from gradwire.comm.parallel.optimizers.rounds import Interval, Rounds
from gradwire.comm.parallel.optimizers.torch_step import copy_tensors
from gradwire.comm.parallel.strategy import clip_grad_norm, strategy_of


class LocalUpdates(Communicating):
    """An inner optimizer on every rank, and a reduction at the end of every round.

    Like torch's `PostLocalSGDOptimizer`, it has no groups and no state of torch's own: both are the inner optimizer's.

    Args:
        model: The model returned by `comm.parallel.wrap` with ``average=False``; frozen parameters are ignored.
        inner: Takes the local steps, over the same parameters.
        reducer: Averages over the ranks; used by this optimizer only.
        interval: H, the steps of a round.
        steps: Optimizer steps of the run; the last one ends a round. None: unknown.

    Raises:
        BadInput: If H is out of range, or the reducer has ``dense_steps``.
    """

    def __init__(
        self, model: nn.Module, inner: Optimizer, reducer: Reducer, interval: Interval, steps: int | None
    ) -> None:
        if reducer.codec.options.dense_steps:
            raise BadInput("dense_steps counts optimizer steps; local updates have dense_rounds.")
        self.inner = inner
        self.__setstate__({})  # gives torch's optimizers their hooks
        self.attach(model, reducer)
        self.rounds = Rounds(interval, steps)
        self.trained = {name: local(p) for name, p in self.parameters.items()}  # this rank's part of them
        self.anchors = {name: p.detach().to(torch.float32, copy=True) for name, p in self.trained.items()}
        self.layout = Layout.dim0([(name, tuple(p.shape)) for name, p in self.trained.items()], reducer.world)
        self.sent = False  # whether the present step communicates; from `exchange` to `step`
        self.anchored = True  # whether the anchors are those of the parameters

    def due(self, step: int) -> bool:
        """Whether a step communicates: the last one of a round does."""
        return self.rounds.ends(step)

    @abstractmethod
    def communicate(self) -> None:
        """Communicate, after the step's inner step; the anchors must not change yet."""

    @abstractmethod
    def advance(self) -> None:
        """Move the anchors, and the parameters, by what was received."""

    @abstractmethod
    def discard(self) -> None:
        """Drop what was received, in a step that is skipped, and return its parameters to their anchors."""

    def average(self, max_norm: float, total: Tensor | None) -> tuple[float, bool]:
        """As `Communicating.exchange`; the norm is the root mean square of the ranks' own norms, each clipped alone.

        A step that communicates takes the inner step here, because what is sent includes it.
        """
        if not self.anchored:
            raise BadInput(
                f"{type(self).__name__} has loaded a state without this rank's rounds: load the whole state_dict(), "
                f"or call load_rank_state(), or restart() to begin a round at the present parameters."
            )
        norm = clip_grad_norm(self.model, max_norm)
        self.sent = self.due(self.reducer.step)
        if self.sent:
            if not math.isfinite(norm) and self.reducer.nonfinite == "skip":
                self.inner.zero_grad(set_to_none=False)  # every rank counts the step, and what it receives is dropped
            self.inner.step()
            self.communicate()
        else:
            self.reducer.skip(self.layout)
        norm, taken = self.finish(norm, total, wait=False)
        if self.sent and not taken:
            self.discard()
        return norm, taken

    def move(self) -> None:
        """Take the inner step, or, in a step that communicates, move by what was received."""
        if self.sent:
            self.advance()
        else:
            self.inner.step()

    def return_to_anchors(self) -> None:
        """Set the parameters to the anchors."""
        for name, p in self.trained.items():
            p.copy_(self.anchors[name])

    @torch.no_grad()
    def restart(self) -> None:
        """Set the anchors to the parameters."""
        for name, p in self.trained.items():
            self.anchors[name].copy_(p)
        self.anchored = True

    @property
    def outer_bytes(self) -> int:
        """Memory of the anchors."""
        return sum(anchor.nbytes for anchor in self.anchors.values())

    @property
    def in_step(self) -> bool:
        """Whether the last step ended a round."""
        return self.reducer.step == 0 or self.rounds.ends(self.reducer.step - 1)

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """As `Communicating.synchronized`: inside, the parameters are the anchors."""
        with torch.no_grad():
            own, strategy = {name: p.clone() for name, p in self.trained.items()}, strategy_of(self.model)
            self.return_to_anchors()
            strategy.changed(self.model)
            yield
            for name, p in self.trained.items():
                p.copy_(own[name])
            strategy.changed(self.model)

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the anchors."""
        for name, anchor in self.anchors.items():
            yield f"the anchor of {name}", anchor

    def round_state(self) -> dict[str, Any]:
        """Return the anchors, and this rank's own parameters and inner state."""
        return {
            "parameters": {name: p.detach() for name, p in self.trained.items()},
            "anchors": self.anchors,
            "inner": {
                name: {key: local(value) for key, value in self.inner.state.get(p, {}).items()}
                for name, p in self.parameters.items()
            },
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups],
        }

    def check_round_state(self, part: Mapping[str, Any]) -> None:
        """Check names and shapes."""
        state.check_keys(part, {"parameters", "anchors", "inner", "groups"}, type(self).__name__)
        state.check_tensors(part["parameters"], self.trained, "parameters")
        state.check_tensors(part["anchors"], self.anchors, "anchors")
        state.check_keys(part["inner"], set(self.parameters), f"{type(self).__name__} (inner)")
        if len(part["groups"]) != len(self.param_groups):
            raise BadInput(
                f"the state has {len(part['groups'])} parameter groups, and this one {len(self.param_groups)}."
            )
        for name, p in self.trained.items():
            moments = {key: value for key, value in part["inner"][name].items() if value.ndim}
            state.check_tensors(moments, dict.fromkeys(moments, p), f"inner moments of {name}")

    @torch.no_grad()
    def load_round_state(self, part: Mapping[str, Any]) -> None:
        """Copy the anchors, and this rank's own parameters and inner state."""
        for name, p in self.parameters.items():
            self.trained[name].copy_(part["parameters"][name])
            self.anchors[name].copy_(part["anchors"][name])
            before = self.inner.state.get(p, {})
            moments = part["inner"][name].items()
            self.inner.state[p] = {key: copied(value, before.get(key), p) for key, value in moments}
        for group, saved in zip(self.param_groups, part["groups"], strict=True):
            group |= copy.deepcopy(saved)
        self.anchored = True

    # What torch and training loops ask of an optimizer is the inner one's.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)

    def load_torch_state(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state; the rounds are still to be loaded."""
        self.inner.load_state_dict(state_dict)
        copy_tensors(self.inner.state)
        self.anchored = False


def copied(value: Tensor, before: Tensor | None, p: nn.Parameter) -> Tensor:
    """Copy a saved moment of a parameter, into the present one where there is one, and return it."""
    if before is not None:
        local(before).copy_(value)
        return before
    if not value.ndim:
        return value.to("cpu", copy=True)  # the number of steps
    value = value.to(p.device, copy=True)
    if not isinstance(p, DTensor):
        return value
    return DTensor.from_local(value, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
