"""Base of local updates: every rank trains alone for a round of H steps, then the ranks communicate.

Under ``hsdp`` what is said of a rank holds for an island, whose ranks send their shards.

In a local step a rank clips its own gradient and takes a step of its own (inner) optimizer; nothing of the model's size
is sent. The step that ends a round communicates, and so does the last step of the run. Between rounds the ranks'
parameters differ; what all ranks share are the anchors, the parameters after the last round.

A value that is not finite follows the reducer's ``nonfinite``. Under ``skip`` all ranks leave out a local step, and if
it ends a round, discard the round: they return to the anchors.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.collectives import Layout, Reducer
from gradwire.errors import BadInput
from gradwire.parallel.names import named_parameters
from gradwire.parallel.optimizers import Communicating
from gradwire.parallel.optimizers.rounds import Interval, Rounds
from gradwire.parallel.step import clip_grad_norm, local
from gradwire.parallel.strategy import strategy_of


class LocalUpdates(Communicating):
    """An inner optimizer on every rank, and a reduction at the end of every round.

    Like torch's `PostLocalSGDOptimizer`, it has no groups and no state of torch's own: both are the inner optimizer's.

    Args:
        model: The model returned by `parallel.wrap` with ``average=False``; frozen parameters are ignored.
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
        self.model = model
        self.inner = inner
        self.reducer = reducer
        self.rounds = Rounds(interval, steps)
        self.parameters = {name: p for name, p in named_parameters(model) if p.requires_grad}
        self.trained = {name: local(p) for name, p in self.parameters.items()}  # this rank's part of them
        self.anchors = {name: p.detach().to(torch.float32, copy=True) for name, p in self.trained.items()}
        self.layout = Layout.dim0([(name, tuple(p.shape)) for name, p in self.trained.items()], reducer.world)
        self.sent = False  # whether the present step communicates; from `exchange` to `step`
        if reducer.world > 1:
            reducer.prepare("all_reduce", sum(p.numel() for p in self.parameters.values()))

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

    @torch.no_grad()
    def exchange(self, max_norm: float, total: Tensor | None = None) -> tuple[float, bool]:
        """As `Communicating.exchange`; the norm is the root mean square of the ranks' own norms, each clipped alone.

        A step that communicates takes the inner step here, because what is sent includes it.
        """
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

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the inner step, or, in a step that communicates, move by what was received; sends nothing."""
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

    def rank_state(self) -> dict[str, Any]:
        """Return the anchors, and this rank's own parameters and inner state."""
        return {
            "parameters": {name: p.detach() for name, p in self.trained.items()},
            "anchors": self.anchors,
            "inner": {
                name: {key: local(value) for key, value in self.inner.state.get(p, {}).items()}
                for name, p in self.parameters.items()
            },
        }

    @torch.no_grad()
    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Load a `rank_state` of the same rank."""
        for name, p in self.parameters.items():
            self.trained[name].copy_(state["parameters"][name])
            for key, value in state["inner"][name].items():
                local(self.inner.state[p][key]).copy_(value)
        self.anchors = dict(state["anchors"])

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

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state; the rest is in `rank_state`."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`."""
        self.inner.load_state_dict(state_dict)
