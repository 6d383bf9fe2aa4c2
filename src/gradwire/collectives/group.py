"""The ranks of a reduction, and the meter of its cost."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.collectives.meter import Meter
from gradwire.collectives.ops import Group


class Ranks(NamedTuple):
    """A process group from the view of one rank.

    Attributes:
        group: The process group; None is the default group.
        world: Number of ranks.
        rank: This rank.
        meter: Counts the bytes of the reduction.
    """

    group: Group
    world: int
    rank: int
    meter: Meter
