"""The end of an optimizer step: the ranks agree on the worst that any of them met in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.base.errors import RunFault, listed
from gradwire.base.units import plural
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.layout import Layout
from gradwire.comm.collectives.meter import Meter

FINITE, LEFT_OUT, NONFINITE, UNREDUCED = range(4)  # the worst that a rank met in a step


class StepCheck(Protocol):
    """Compares what a model, or a part of one, needs with what is reduced."""

    @property
    def names(self) -> set[str]:
        """The parameters that it watches."""

    def begun(self, layout: Layout) -> None:
        """Record that a reduction has started."""

    def finish(self) -> list[str] | None:
        """End the step; return the parameters that need a reduction and had none, or None if nothing was reduced."""

    def left_out(self) -> set[str]:
        """Return the parameters that this rank's backward passes left out in the step, and that were reduced."""

    def leave_out(self, names: set[str]) -> None:
        """Leave parameters without a gradient that all ranks left out."""


def check_reduced(watches: Sequence[StepCheck], step: int) -> list[str]:
    """End the step of the watched models.

    Returns:
        The parameters whose gradients this rank should not use, since they were not reduced.

    Raises:
        RunFault: If nothing was reduced; as ranks reduce together, this is so on all of them.
    """
    models = [watch.finish() for watch in watches]
    if None in models:
        which = "" if len(models) == 1 else f" of {models.count(None)} of the {len(models)} models of this reducer"
        raise RunFault(
            f"no gradient{which} was averaged in optimizer step {step + 1}: run the backward pass through the wrapped "
            f"model (not a copy or its inner module) and outside of no_sync, end each step once (by the optimizer "
            f"given to compress_gradients, or by finish()), and wrap a model again after converting it. Models that "
            f"take their steps in turn need a reducer each.",
            step=step,
        )
    return [name for names in models for name in names or ()]


class Agreement:
    """An agreement that has begun.

    Args:
        group: The ranks that agree.
        meter: Counts the bytes.
        flag: uint8 [1], set if this rank met a value that is not finite, and cleared here; None: it reduced nothing.
        unreduced: This rank's parameters with gradients that were not reduced.
        left_out: Those that its backward passes left out, and that were reduced.
        total: The caller's vector, which is summed over the ranks in the same message; None: there is none.
    """

    def __init__(
        self,
        group: ops.Group,
        meter: Meter,
        flag: Tensor | None,
        unreduced: list[str],
        left_out: set[str],
        total: Tensor | None,
    ) -> None:
        self.group, self.meter = group, meter
        self.unreduced, self.left_out, self.total = unreduced, left_out, total
        # Weights of a rank's worst event in a sum over the ranks: each exceeds the sum of all lesser ones.
        weights = [0, 1, dist.get_world_size(group) + 1, math.inf]
        self._weights = torch.tensor(weights, dtype=torch.float32, device="cpu")
        if flag is None:
            flag = torch.zeros(1, dtype=torch.uint8, device=self._device if total is None else total.device)
        met = UNREDUCED if unreduced else LEFT_OUT if left_out else FINITE
        worst = (NONFINITE * flag).clamp_(min=met)
        flag.zero_()
        counted: dict[str, Any] = {"group": group, "purpose": "agreement", "meter": meter}
        if total is None:
            self._pending = ops.begin_all_reduce(worst, "max", **counted)
        else:
            summed = torch.cat([self._weights.to(worst.device)[worst.long()], total])
            self._pending = ops.begin_all_reduce(summed, "sum", **counted)

    @property
    def _device(self) -> str:
        """The device of messages that no gradient is part of."""
        return "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"

    def wait(self) -> int:
        """Return the worst that any rank met, and set the total; the same on all ranks."""
        agreed = self._pending.wait()
        if self.total is None:
            return int(agreed)
        self.total.copy_(agreed[1:])
        return int((self._weights <= agreed[0].cpu()).sum()) - 1

    def left_out_by_all(self, names: set[str]) -> set[str]:
        """Return those of the parameters that all ranks left out; every rank calls this."""
        ordered = sorted(names)
        used = torch.tensor([name not in self.left_out for name in ordered], dtype=torch.uint8, device=self._device)
        counts = ops.all_reduce(used, "max", self.group, "agreement", self.meter).tolist()
        return {name for name, count in zip(ordered, counts, strict=True) if not count}

    def described(self, step: int) -> str:
        """Return the message about parameters that were not reduced, from all ranks; every rank calls this."""
        gathered = zip(ops.ranks_of(self.group), ops.gather_objects(self.unreduced, self.group), strict=True)
        (rank, names), *others = [(rank, names) for rank, names in gathered if names]
        missing = "parameter has a gradient that was" if len(names) == 1 else "parameters have gradients that were"
        more = f", nor were some on {plural('rank', len(others))} {', '.join(str(rank) for rank, _ in others)}"
        return (
            f"optimizer step {step}: {len(names)} {missing} not reduced on rank {rank} "
            f"({listed(names)}){more if others else ''}. "
            f"Was a parameter replaced, converted or unfrozen after the reducer was attached, or is a backward pass "
            f"around it or in no_sync?"
        )
