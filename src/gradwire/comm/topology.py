"""Which strategies, numbers of islands and kinds of links can be combined.

Rank r is in island ``r // ranks_per_island``. A link is a rate, that of each rank's own cable, or ``between-RATE``: one
cable to each island, and no limit inside it. Strategy ``hsdp`` shards inside islands; the others run on a link between
islands as they run on any link, and ignore which ranks share a cable.
"""

from __future__ import annotations

import math

from gradwire.base.errors import BadInput
from gradwire.base.plugins import Plugins
from gradwire.base.units import UNSHAPED, bits_per_second

STRATEGIES = Plugins("strategy", "gradwire.comm.parallel.strategies", "gradwire.strategies")
BETWEEN = "between-"  # prefix of a link with one cable per island
SHARDING = ("fsdp1", "fsdp2", "hsdp")  # strategies whose ranks hold a part of the model


def check_islands(world: int, islands: int) -> None:
    """Check that ranks can be divided into islands.

    Raises:
        BadInput: If there are fewer than two islands, or their number does not divide that of the ranks.
    """
    if islands < 2:
        raise BadInput(
            f"islands is {islands}: strategy hsdp, or a link between islands, needs at least 2; for a single island "
            "use fsdp2, and a rate such as 100mbit."
        )
    if world % islands:
        raise BadInput(
            f"{islands} islands do not divide {world} ranks evenly: take a world size that is a multiple of {islands}."
        )


def check_topology(strategy: str, world: int, islands: int, link: str | None) -> None:
    """Check that ranks can form their islands, and that the strategy or the link has them; None is an unknown link.

    Raises:
        BadInput: As `check_islands`, or if there are islands that neither the strategy nor the link has.
    """
    if strategy == "hsdp" or (link is not None and between_islands(link)):
        check_islands(world, islands)
    elif islands != 1 and link is not None:
        raise BadInput(
            f"islands is {islands}: strategy {strategy} has islands only on a link between them, such as "
            "between-100mbit; omit it, or use hsdp."
        )


def check_simulated(strategy: str, link: str) -> None:
    """Check that ranks can be simulated in one process.

    Raises:
        BadInput: If the strategy shards the model, or there is a link.
    """
    if strategy in SHARDING:
        raise BadInput(
            f"simulated ranks hold a whole model each, and strategy {strategy} shards it: use naive, bucket or ddp."
        )
    if link != UNSHAPED:
        raise BadInput(f"simulated ranks share a process, and a link of {link} is between processes: omit one of them.")


def sharded_islands(strategy: str, islands: int) -> int:
    """Return the number of islands that hold the model in shards: all of ``hsdp``, 1 for other strategies."""
    return islands if strategy == "hsdp" else 1


def between_islands(link: str) -> bool:
    """Return whether a link is one cable per island, not per rank."""
    return link.startswith(BETWEEN)


def link_rate(link: str) -> float:
    """Bits per second of each cable of a link, infinite without a limit.

    Raises:
        BadInput: If the link is invalid.
    """
    if link == UNSHAPED:
        return math.inf
    named, _, rate = link.rpartition("-")
    if not named or between_islands(link):
        return bits_per_second(link.removeprefix(BETWEEN))
    bits_per_second(rate)
    raise BadInput(
        f"unknown class of links {named!r} in {link!r}. Did you mean '{BETWEEN}{rate}', of each island? {rate} is "
        "of each rank; inside islands there is no limit."
    )
