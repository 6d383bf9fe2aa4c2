"""Process groups that only their members make, and not all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import ops
from gradwire.comm.torch_internals import named_group, timeout_of


# Why: docs/decisions.md, "A group has a name that its members agree on".
def new_group(
    ranks: Sequence[int],
    known: Sequence[ops.Group],
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Make a process group; all of its members call this together.

    Args:
        ranks: The members, in the order of their numbers in the group.
        known: Groups through which the members agree on a name: one of the same members, or one for each dimension of
            their mesh.
        timeout: Of its collectives; None is that of the first known group.
        backend: The backend; None is the default group's.
    """
    name = f"gradwire {uuid4()}"
    for group in known:  # after the first dimension ranks have the name of those with coordinate 0 there, and so on
        name = ops.gather_objects(name, group)[0]
    return named_group(name, ranks, timeout or timeout_of(known[0]), backend)


def copied(group: ops.Group) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks, with the same timeout."""
    return new_group(dist.get_process_group_ranks(group), [group], backend="gloo")


class Shared:
    """A process group that a copy of its user has in common with it; in a file it is the default group.

    Args:
        group: The ranks; None is the default group.
    """

    def __init__(self, group: ops.Group) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        """Return this one."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickles.

        Raises:
            BadInput: For another group, which a program that loads it need not have.
        """
        if self.group not in (None, dist.group.WORLD):
            raise BadInput(
                f"ranks {ops.ranks_of(self.group)} are a process group that cannot be pickled, only the default group "
                f"can: save the state_dict() of the model and of its optimizer."
            )
        return Shared, (None,)
