"""Who takes part in a reduction, and who counts what it costs."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.collectives.meter import Meter
from gradwire.collectives.ops import Group


class Ranks(NamedTuple):
    """The ranks of a group as one of them sees them.

    Attributes:
        group: None is the default group.
        world: Number of ranks.
        rank: This one's number.
        meter: Counts every byte that the reduction sends.
    """

    group: Group
    world: int
    rank: int
    meter: Meter
