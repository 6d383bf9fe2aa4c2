"""Strategies by name, islands of ranks, and links by class: which of them go together.

Rank r is in island ``r // ranks_per_island``. A link is a rate, that of each rank's own cable, or ``between-RATE``: one
cable to each island, and no limit inside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradwire.errors import BadInput, unknown
from gradwire.plugins import Plugins
from gradwire.units import UNSHAPED, bits_per_second

STRATEGIES = Plugins("strategy", "gradwire.parallel.strategies", "gradwire.strategies")
BETWEEN = "between-"  # prefix of a link with one cable per island
CLASSES = ("inside", "between")


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


def check_topology(strategy: str, world: int, islands: int, link: str = UNSHAPED) -> None:
    """Check that a strategy supports islands of ranks, and a link between them.

    Raises:
        BadInput: As `check_islands`, or if a strategy other than hsdp has islands or a link between them.
    """
    if strategy == "hsdp":
        check_islands(world, islands)
    elif islands != 1:
        raise BadInput(f"islands is {islands}: only strategy hsdp has islands, not {strategy}; omit it.")
    if between_islands(link) and strategy != "hsdp":
        raise BadInput(
            f"link {link} is a cable between islands, and only strategy hsdp has islands, not {strategy}; "
            f"use {link.removeprefix(BETWEEN)}, a cable to each rank."
        )


def between_islands(link: str) -> bool:
    """Whether a link is one cable per island, not per rank."""
    return link.startswith(BETWEEN)


def link_rate(link: str) -> float:
    """Bits per second of each cable of a link, infinite without a limit.

    Raises:
        BadInput: If the link is invalid.
    """
    return math.inf if link == UNSHAPED else bits_per_second(link.removeprefix(BETWEEN))


def link_of_classes(classes: Mapping[str, Any]) -> str:
    """The name of a link by class: ``between-100mbit`` for ``{"inside": "none", "between": "100mbit"}``.

    Raises:
        BadInput: If a class is unknown or missing, the one inside islands is limited, or the one between them is not.
    """
    for given in classes:
        if given not in CLASSES:
            raise unknown("class of links", str(given), CLASSES)
    inside, between = (classes.get(name, UNSHAPED) for name in CLASSES)
    if inside != UNSHAPED:
        raise BadInput(f"inside: {inside}: ranks of an island share its interface, so that `inside` must be none.")
    if between == UNSHAPED:
        raise BadInput("a link by class needs a rate `between` islands, such as {inside: none, between: 100mbit}.")
    return f"{BETWEEN}{between}"
