"""Parameters that travel as quantized differences from a replica, which every rank keeps.

Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM Training"
(arXiv:2410.15526, 2024): the owner of a shard w encodes ``w - replica`` of its row, and all ranks, the owner too, add
what they decode to their replica. Whatever an encoding misses is part of the next difference, so the error does not
accumulate, and needs no residual. Shards stay exact; ranks compute with the replica.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradwire.comm.collectives.layout import Layout
from gradwire.comm.collectives.parameters import ParameterGather


class Replica:
    """The parameters of a layout as all ranks compute with them; bit-equal on all ranks of like machines.

    Args:
        gather: Sends the differences, and once, here, everything as float32.
        layout: The parameters' layout.
        shards: This rank's part of each parameter by name, float32.

    Attributes:
        values: float32 [world * row_numel]; padding is 0.
    """

    def __init__(self, gather: ParameterGather, layout: Layout, shards: Mapping[str, Tensor]) -> None:
        self.gather = gather
        self.layout = layout
        self.values = torch.zeros(layout.numel, device=next(iter(shards.values())).device)
        self.reset(shards)

    @property
    def own(self) -> Tensor:
        """This rank's row: float32 [row_numel], a view."""
        return self.values.view(self.layout.world, -1)[self.gather.ranks.rank]

    def reset(self, shards: Mapping[str, Tensor]) -> None:
        """Set the replica to the ranks' exact shards, by name."""
        row = torch.zeros_like(self.own)
        for piece in self.layout.rows[self.gather.ranks.rank]:
            row[self.layout.place_in_row(piece)] = shards[piece.name].reshape(-1)
        self.restore(row)

    def restore(self, row: Tensor) -> None:
        """Set the replica to the rows that all ranks pass here, bit by bit."""
        self.own.copy_(row)
        self.gather(self.values, self.layout, exact=True)
        self.values.add_(0.0)  # turns -0.0 into 0.0, as `ParameterGather.add` needs it

    def follow(self, row: Tensor) -> None:
        """Move the replica towards the ranks' shards.

        Args:
            row: This rank's shard as it is now: float32 [row_numel].
        """
        self.gather.add(row - self.own, self.values, self.layout)
