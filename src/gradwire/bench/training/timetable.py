"""The steps of a run that warm up, that are profiled, and that are timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.bench.config import Training


class Timetable(NamedTuple):
    """The first timed step and the profiled steps of a run.

    Attributes:
        first: The first step after the warm-up.
        profiled: The steps with the profiler, of which it records all but the first; in no step time.
        lacking: Kinds of steps that are not both profiled and timed, as the run is too short.
    """

    first: int
    profiled: range
    lacking: tuple[str, ...] = ()


def timetable(training: Training, kinds: Sequence[str], begun: int = 0) -> Timetable:
    """Plan the steps of a run.

    The warm-up lasts until a step of each kind was taken: whole dense steps, and a whole round of local updates. The
    profiler records the fewest steps, at least `profile_steps`, in which each kind occurs. A run that is too short for
    that has the warm-up of its settings, in which a round may be the first one.

    Args:
        training: The settings.
        kinds: The kind of each step of the run.
        begun: The first step of this process.
    """
    later = kinds[:-1]  # the last step may be of a kind alone
    seen = 1 + max((later.index(kind) for kind in set(later)), default=0)
    needed = set(later[seen - 1 :])
    for first in (max(training.warmup_steps, seen if len(set(later)) > 1 else 0), training.warmup_steps):
        start = max(first, begun)
        if not training.profile and needed <= {*kinds[first:]}:
            return Timetable(first, range(start, start))
        if training.profile and (profiled := shortest(kinds, needed, start, training.profile_steps)) is not None:
            return Timetable(first, profiled)
    end = min(start + training.profiled_steps, len(kinds))
    return Timetable(first, range(start, end), tuple(sorted(needed)))


def shortest(kinds: Sequence[str], needed: set[str], start: int, least: int) -> range | None:
    """Find the shortest range of steps to profile, and of these the first; None if there is none.

    Args:
        kinds: The kind of each step.
        needed: The kinds that are to be among its recorded steps, and among the steps that are left to time.
        start: The first step that may be in it.
        least: The fewest recorded steps.
    """
    if not needed <= {*kinds[start + 1 :]}:
        return None
    total = Counter(kinds[start:])
    ends = {begin: reaching(kinds, needed, begin, least) for begin in range(start + 1, len(kinds))}
    for size, begin in sorted((end - begin, begin) for begin, end in ends.items() if end is not None):
        left = total - Counter(kinds[begin - 1 : begin + size])
        if left and all(left[kind] for kind in needed):
            return range(begin - 1, begin + size)
    return None


def reaching(kinds: Sequence[str], needed: set[str], begin: int, least: int) -> int | None:
    """The end of the shortest range from ``begin`` with all needed kinds and ``least`` steps; None if there is none."""
    lacking = set(needed)
    for step in range(begin, len(kinds)):
        lacking.discard(kinds[step])
        if not lacking and step + 1 - begin >= least:
            return step + 1
    return None
