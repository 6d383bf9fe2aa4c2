"""A reducer between groups of ranks that may be lost and may join; a quorum chooses them (`optimizers.quorum`)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.queue import ReductionQueue
from gradwire.comm.collectives.reducer import Given, Reducer, takes_options


# Why: docs/decisions.md, "A round ends with a quorum".
class QuorumReducer(Reducer):
    """Reduces between groups; `finish` agrees inside this rank's group, the default process group.

    Args:
        compressor: As for `Reducer`.
        number: This rank's number among the ranks of all groups, whether or not they are there; it draws with it.
        options: The other options of `Reducer`.

    Raises:
        BadInput: As `Reducer`, or if residuals are stored in fewer bits: they are cut again for other ranks.
    """

    @takes_options
    def __init__(self, compressor: Given, number: int, **options: Any) -> None:
        super().__init__(compressor, draws=number, **options)
        if self.codec.options.residual_dtype != "float32":
            raise BadInput("a manager needs residual_dtype float32: residuals are cut again when groups change.")
        self.topology = "groups of a quorum"
        self.reduce_over(None)

    @property
    def alone(self) -> bool:
        """Never: `finish` checks the norm of a gradient also where there is no other group."""
        return False

    def reduce_over(self, group: dist.ProcessGroup | None) -> None:
        """Reduce over other ranks from now on, and keep the residuals; None: over this rank only."""
        self.group = group
        self.world, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self._queue = ReductionQueue(group)  # a round waits for its mean
        self.algorithm = self.codec.options.algorithm
        self.codec.loosen()

    def agree(self) -> None:
        """Wait for the other groups; a value that was not finite in one of them sets the flag of all."""
        flag = self.codec.flag
        if self.world > 1 and flag is not None:
            ops.all_reduce(flag, "max", self.group, "agreement", self.meter)
