"""DiLoCo: local AdamW steps; the ranks average what they changed, and an outer SGD with momentum applies it.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv:2311.08105, 2023). At the
end of a round each rank's pseudo-gradient is its anchor minus its parameters. The cell's compressor and error feedback
work on it, and SGD with Nesterov momentum takes a step with the mean. The inner moments stay on their rank. Other
methods are the same with other defaults: `communication.PRESETS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Layout, Reducer, state
from gradwire.comm.collectives.queue import Handle
from gradwire.comm.parallel.optimizers import inner as inner_optimizers
from gradwire.comm.parallel.optimizers.local import LocalUpdates
from gradwire.comm.parallel.optimizers.rounds import Interval


class DiLoCo(LocalUpdates):
    """DiLoCo; see the module for the algorithm.

    Args:
        model: As for `local.LocalUpdates`.
        groups: Parameter groups of the inner optimizer.
        reducer: As for `local.LocalUpdates`.
        H: Steps of a round, or a schedule.
        outer_lr: Learning rate of the outer SGD; 1 without momentum moves to the mean of the ranks.
        outer_momentum: Its Nesterov momentum; 0 for none.
        dense_rounds: In the first so many rounds everything travels as float32.
        inner: The inner optimizer, ``adamw``, ``muon`` or ``sgd``.
        steps: Number of steps of the run; the last one ends a round. None: unknown.
        options: Options of the inner optimizer.

    Raises:
        BadInput: If an option is out of range, or as the base class.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[dict[str, Any]],
        reducer: Reducer,
        *,
        H: Interval = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        dense_rounds: int = 0,
        inner: str = "adamw",
        steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, inner_optimizers.build(inner, model, groups, **options), reducer, H, steps)
        if not outer_lr > 0:
            raise BadInput(f"outer_lr is {outer_lr}; it must be above 0.")
        if not 0 <= outer_momentum < 1:
            raise BadInput(f"outer_momentum is {outer_momentum}; it must be at least 0 and below 1.")
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.dense_rounds = dense_rounds
        self.momenta = {name: torch.zeros_like(p) for name, p in self.anchors.items()} if outer_momentum else {}
        self.delivered: dict[str, Tensor] = {}  # mean pseudo-gradients, from `exchange` to `step`

    @property
    def dense_steps(self) -> int:
        """The steps of the dense rounds."""
        return self.rounds.began(self.dense_rounds)

    @property
    def outer_bytes(self) -> int:
        """Memory of the anchors and the outer momentum."""
        return super().outer_bytes + sum(momentum.nbytes for momentum in self.momenta.values())

    def communicate(self) -> None:
        """Average the pseudo-gradients."""
        self.receive(self.begin(self.layout).wait(), self.layout)

    def begin(self, layout: Layout) -> Handle:
        """Begin to average the pseudo-gradients of a layout's parameters."""
        deltas = {name: self.anchors[name] - self.trained[name] for name in layout.parameters}
        with self.reducer.plain() if self.reducer.step < self.dense_steps else nullcontext():
            return self.reducer.begin_all_reduce(layout.pack(deltas), layout)

    def receive(self, mean: Tensor, layout: Layout) -> None:
        """Keep the mean pseudo-gradients of a layout's parameters for `advance`."""
        self.delivered |= {name: torch.empty_like(self.anchors[name]) for name in layout.parameters}
        layout.unpack(mean, self.delivered)

    def advance(self) -> None:
        """Take the outer step, and continue from the anchors."""
        for name, mean in self.delivered.items():
            if self.outer_momentum:
                momentum = self.momenta[name].mul_(self.outer_momentum).add_(mean)
                mean.add_(momentum, alpha=self.outer_momentum)
            self.anchors[name].add_(mean, alpha=-self.outer_lr)
            self.settle(name)
        self.delivered = {}

    def settle(self, name: str) -> None:
        """Continue from a parameter's anchor."""
        self.trained[name].copy_(self.anchors[name])

    def discard(self) -> None:
        """Drop what was received, and return its parameters to their anchors."""
        for name in self.delivered:
            self.trained[name].copy_(self.anchors[name])
        self.delivered = {}

    def restart(self) -> None:
        """Begin a round at the present parameters, without outer momentum."""
        super().restart()
        for momentum in self.momenta.values():
            momentum.zero_()

    def round_state(self) -> dict[str, Any]:
        """Return the base class's state, and the outer momentum."""
        return super().round_state() | {"momenta": self.momenta}

    def check_round_state(self, part: Mapping[str, Any]) -> None:
        """Check names and shapes."""
        super().check_round_state(part)
        state.check_keys(part, {"momenta"}, type(self).__name__)
        state.check_tensors(part["momenta"], self.momenta, "outer momenta")

    def load_round_state(self, part: Mapping[str, Any]) -> None:
        """Copy the base class's state, and the outer momentum."""
        super().load_round_state(part)
        for name, momentum in self.momenta.items():
            momentum.copy_(part["momenta"][name])
        self.delivered = {}

    def shared(self) -> Any:
        """Yield the anchors and the outer momentum."""
        yield from super().shared()
        for name, momentum in self.momenta.items():
            yield f"the outer momentum of {name}", momentum
