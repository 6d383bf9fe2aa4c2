"""Strategies by name, and islands of ranks: which world sizes and strategies have them.

Rank r is in island ``r // ranks_per_island``.
"""

from __future__ import annotations

from gradwire.errors import BadInput
from gradwire.plugins import Plugins

STRATEGIES = Plugins("strategy", "gradwire.parallel.strategies", "gradwire.strategies")


def check_islands(world: int, islands: int) -> None:
    """Check that ranks can be divided into islands.

    Raises:
        BadInput: If there are fewer than two islands, or their number does not divide that of the ranks.
    """
    if islands < 2:
        raise BadInput(f"islands is {islands}: strategy hsdp needs at least 2; use fsdp2 for a single one.")
    if world % islands:
        raise BadInput(
            f"{islands} islands do not divide {world} ranks evenly: take a world size that is a multiple of {islands}."
        )


def check_topology(strategy: str, world: int, islands: int) -> None:
    """Check that a strategy supports islands of ranks.

    Raises:
        BadInput: As `check_islands`, or if a strategy other than hsdp has islands.
    """
    if strategy == "hsdp":
        check_islands(world, islands)
    elif islands != 1:
        raise BadInput(f"islands is {islands}: only strategy hsdp has islands, not {strategy}; omit it.")
