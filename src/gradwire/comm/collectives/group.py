"""The ranks of a reduction, the meter of its cost, and the timeout of their process group."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire.base.errors import BadInput
from gradwire.comm.collectives.meter import Meter
from gradwire.comm.collectives.ops import Group


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


def timeout_of(group: Group) -> timedelta:
    """Return the timeout of a process group's collectives, for which torch has no public name."""
    own = group or dist.group.WORLD
    assert own is not None
    device = torch.device("cuda" if dist.get_backend(own) == "nccl" else "cpu")
    return own._get_backend(device).options._timeout


def check_initialized(what: str) -> None:
    """Check that there is a process group.

    Args:
        what: The message's subject, with its article.

    Raises:
        BadInput: If there is none.
    """
    if not dist.is_initialized():
        raise BadInput(
            f"{what} needs a process group: call torch.distributed.init_process_group first, in a script that torchrun "
            f"starts."
        )
