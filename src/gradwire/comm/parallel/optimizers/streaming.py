"""Streaming DiLoCo: the model in fragments, one of them in flight while training goes on.

Douillard et al., "Streaming DiLoCo with overlapping communication" (arXiv:2501.18512, 2025). Each fragment has a
round of H steps, and their ends are spread over H. A fragment is sent at the end of its round and received ``delay``
steps later, when its anchors take the outer step, and ``parameters = (1 - alpha) anchors + alpha parameters``. The last
step of a run receives what is in flight, and then sends all fragments and waits.

Bytes of a reduction in flight count in the step in which it is done, which differs between runs; sums do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.base.errors import BadInput
from gradwire.base.strict import checked, checked_arguments
from gradwire.comm.collectives import state
from gradwire.comm.collectives.queue import Handle
from gradwire.comm.communication import Count, Interval, Streaming
from gradwire.comm.parallel.model import blocks
from gradwire.comm.parallel.optimizers.base import LOCAL_STEP
from gradwire.comm.parallel.optimizers.diloco import DiLoCo


# Why: docs/decisions.md, "A fragment in flight".
class StreamingDiLoCo(DiLoCo):
    """DiLoCo with fragments; see the module for the algorithm.

    Args:
        optimizer: As for `diloco.DiLoCo`.
        model: As for `diloco.DiLoCo`.
        sync_every: Steps of a fragment's round.
        fragments: Number of fragments; one is in flight at a time.
        delay: Steps from sending a fragment to receiving it.
        alpha: Part of the own parameters in the mixture with the received ones.
        steps: Number of steps of the run. None: unknown.
        options: Other options of `diloco.DiLoCo`; with the reducer's ``overlap`` it sends while training goes on.

    Raises:
        BadInput: If a fragment would be empty, or two would be in flight; if what the reducer does depends on the step;
            or as the base class.
    """

    regroups = False  # a fragment is in flight when groups change

    @checked_arguments
    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        sync_every: Interval,
        fragments: int,
        delay: int = 1,
        alpha: float = 0.5,
        steps: Count | None = None,
        **options: Any,
    ) -> None:
        streaming = checked(Streaming, {"fragments": fragments, "delay": delay, "alpha": alpha}, "streaming")
        least = fragments * (delay + 1)
        if not isinstance(sync_every, int) or least > sync_every:
            raise BadInput(
                f"sync_every is {sync_every}; for {fragments} fragments, one in flight at a time, and a delay of "
                f"{delay}, it must be a number from {least} on."
            )
        super().__init__(optimizer, model, sync_every=sync_every, steps=steps, **options)
        reducer = self.reducer
        if reducer.world > 1 and (reducer.algorithm == "native" or len(reducer.codec.schedule.plateaus) > 1):
            raise BadInput(
                "streaming needs algorithm exchange or gather and no schedule: a message may end in any step."
            )
        self.delay, self.alpha, self.steps = delay, streaming.alpha, steps
        self.fragments = [self.cut(names) for names in divided(self.model, self.parameters, fragments)]
        self.others = [
            self.cut([name for name in self.trained if name not in fragment.parameters]) for fragment in self.fragments
        ]
        self.ends = [
            (number + 1) * sync_every // fragments for number in range(fragments)
        ]  # steps of a round after which each is sent
        self.in_flight: tuple[int, Handle] | None = None  # a fragment's number, and its reduction

    def kind(self, step: int) -> str:
        """Whether a step sends or receives a fragment, or is the last one."""
        does = {"last": self.last(step), "sends": self.sends(step) is not None}
        does["receives"] = step >= self.delay and self.sends(step - self.delay) is not None
        return " and ".join(name for name, holds in does.items() if holds) or LOCAL_STEP

    def due(self, step: int) -> bool:
        """Whether a step sends or receives a fragment, or is the last one."""
        return self.sends(step) is not None or self.receives(step) or self.last(step)

    def last(self, step: int) -> bool:
        """Whether a step is the run's last one."""
        return step + 1 == self.steps

    def sends(self, step: int) -> int | None:
        """The fragment that a step sends, or None."""
        taken = step % self.ends[-1] + 1  # steps of the round
        return self.ends.index(taken) if taken in self.ends else None

    def receives(self, step: int) -> bool:
        """Whether a step receives the fragment in flight."""
        return self.in_flight is not None and self.sends(step - self.delay) == self.in_flight[0]

    @property
    def in_step(self) -> bool:
        """Whether no step or the last one was taken."""
        return self.reducer.step in (0, self.steps)

    def send(self) -> None:
        """Receive the fragment in flight if it is due, and send the one whose round ends; in the last step, all."""
        step = self.reducer.step
        number = self.sends(step)
        if self.last(step):
            if self.in_flight is not None:
                self.receive_fragment()
                self.advance()
            super().send()
            return
        self.reducer.skip(self.layout if number is None else self.others[number])
        if number is not None:
            self.in_flight = number, self.begin(self.fragments[number])
        if self.receives(step):
            self.receive_fragment()

    def receive_fragment(self) -> None:
        """Wait for the fragment in flight; one that is not finite sets the reducer's flag, on all ranks alike."""
        assert self.in_flight is not None
        number, handle = self.in_flight
        mean, self.in_flight = handle.wait(), None
        if not mean.isfinite().all():
            self.reducer.codec.note(torch.ones(1, dtype=torch.uint8, device=mean.device))
        self.receive(mean, self.fragments[number])

    def settle(self, name: str) -> None:
        """Mix a parameter with its anchor; in the last step, set it to the anchor."""
        if self.last(self.reducer.step - 1):
            super().settle(name)
        else:
            self.trained[name].lerp_(self.anchors[name].to(self.trained[name].dtype), 1 - self.alpha)

    def restart(self) -> None:
        """As `DiLoCo.restart`, with nothing in flight."""
        super().restart()
        self.in_flight = None

    def round_state(self) -> dict[str, Any]:
        """Return the base class's state, and what is in flight, for which this waits."""
        flying = self.in_flight and {"fragment": self.in_flight[0], "mean": self.in_flight[1].wait()}
        return super().round_state() | {"in_flight": flying}

    def check_round_state(self, saved: Mapping[str, Any]) -> None:
        """Check names and shapes."""
        super().check_round_state(saved)
        state.check_keys(saved, {"in_flight"}, type(self).__name__)
        flying = saved["in_flight"]
        if flying is not None:
            if not 0 <= flying["fragment"] < len(self.fragments):
                raise BadInput(f"the state has fragment {flying['fragment']} in flight, of {len(self.fragments)}.")
            numel = self.fragments[flying["fragment"]].numel
            state.check_tensors(
                {"mean": flying["mean"]}, {"mean": torch.empty(numel, dtype=torch.float32, device="meta")}, "means"
            )

    def load_round_state(self, saved: Mapping[str, Any]) -> None:
        """Copy the base class's state, and what is in flight."""
        super().load_round_state(saved)
        flying = saved["in_flight"]
        self.in_flight = None if flying is None else (flying["fragment"], Handle(flying["mean"].clone()))


def divided(model: nn.Module, trained: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """Distribute parameters over fragments: every ``count``-th block, and the rest to balance their sizes.

    Args:
        model: The wrapped model.
        trained: Parameters by name.
        count: Number of fragments.

    Returns:
        The names in each fragment, in the order of ``trained``.

    Raises:
        BadInput: If a fragment would be empty.
    """
    of_block = {p: i % count for i, block in enumerate(blocks(model)) for p in block.parameters()}
    chosen = {name: of_block[p] for name, p in trained.items() if p in of_block}
    sizes = [
        sum(trained[name].numel() for name, fragment in chosen.items() if fragment == number) for number in range(count)
    ]
    for name in sorted(trained.keys() - chosen.keys(), key=lambda name: (-trained[name].numel(), name)):
        chosen[name] = sizes.index(min(sizes))
        sizes[chosen[name]] += trained[name].numel()
    if 0 in sizes:
        raise BadInput(f"{len(trained)} parameters cannot be distributed over {count} fragments.")
    return [[name for name in trained if chosen[name] == number] for number in range(count)]
