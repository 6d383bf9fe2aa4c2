"""When local updates end a round: after every H steps, where a change of H begins a new round."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from gradwire.base.errors import BadInput

Interval = int | Mapping[int, int]
"""Steps of a round, or, as a schedule, the steps of a round from a step on: ``{0: 1, 100: 5}``."""


class Rounds:
    """The rounds of a run.

    Args:
        interval: Steps of a round.
        steps: Optimizer steps of the run; the last one ends a round. None: unknown.

    Raises:
        BadInput: If a round would have no step, or the schedule does not begin at step 0.
    """

    def __init__(self, interval: Interval, steps: int | None = None) -> None:
        lengths = {0: interval} if isinstance(interval, int) else dict(sorted(interval.items()))
        if 0 not in lengths or min(lengths) < 0 or min(lengths.values()) < 1:
            raise BadInput(f"H is {interval}; give a number from 1 on, or a schedule such as {{0: 1, 100: 5}}.")
        self._starts, self._lengths = list(lengths), list(lengths.values())
        self._steps = steps

    def ends(self, step: int) -> bool:
        """Whether optimizer step ``step``, counted from 0, is the last one of a round."""
        if step + 1 in (self._steps, *self._starts):
            return True
        at = bisect_right(self._starts, step) - 1
        return (step + 1 - self._starts[at]) % self._lengths[at] == 0

    def began(self, number: int) -> int:
        """The first optimizer step of round ``number``, counted from 0."""
        ends = [*self._starts[1:], None]
        for start, end, length in zip(self._starts, ends, self._lengths, strict=True):
            rounds = None if end is None else -(-(end - start) // length)
            if rounds is None or number < rounds:
                return start + number * length
            number -= rounds
        raise AssertionError("the last interval has no end")
