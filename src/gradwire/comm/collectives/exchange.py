"""Exchange: every rank sends each row's encodings to the row's owner, which decodes, sums in float32 and divides once.

An all-reduce then sends each owner's means to all ranks, encoded again or as float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.comm.collectives.algorithm import Algorithm, Kind
from gradwire.comm.collectives.layout import Layout
from gradwire.comm.collectives.messages import exchange
from gradwire.comm.collectives.ops import CHUNK
from gradwire.comm.collectives.plan import Sizes


class Exchange(Algorithm):
    """Works with every compressor."""

    name = "exchange"

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Tensor:
        """Encode all rows and send them to their owners; decode and average this rank's row."""
        codec, ranks = self.codec, self.ranks
        plan = codec.plan(layout, "scatter")
        own = plan.rows[ranks.rank]
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, lengths = codec.encode(flat, plan.whole, "scatter", lambda row: int(row != ranks.rank))
        known = [*own.sizes] * ranks.world
        incoming, lengths = exchange(message, lengths, plan.sizes, known, ranks, bulk=bulk(plan.sizes))
        with ranks.meter.span("decode", "codec", device=flat.device):
            mean = torch.zeros(layout.row_numel, dtype=torch.float32, device=flat.device)
            own.decode(incoming, lengths, mean, "zero")  # summed in rank order
            return mean.div_(ranks.world)

    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Tensor:
        """Reduce-scatter, then gather the means; all ranks use the decoded values, the owner too."""
        codec, ranks = self.codec, self.ranks
        mean = self.mean_of_row(flat, layout)
        plan = codec.plan(layout, "gather")
        own = plan.rows[ranks.rank]
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, lengths = codec.encode(mean, own, "gather", lambda _: ranks.world - 1)
            copies, known = torch.cat([message] * ranks.world), [*own.sizes] * ranks.world
        incoming, lengths = exchange(copies, lengths * ranks.world, known, plan.sizes, ranks, bulk=bulk(plan.sizes))
        with ranks.meter.span("decode", "codec", device=flat.device):
            full = torch.zeros(layout.numel, dtype=torch.float32, device=mean.device)
            plan.whole.decode(incoming, [[length for row in lengths for length in row]], full, "blank")
            return full

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the payload bytes over all ranks: ``world - 1`` times all encodings, for each phase.

        In the reduce-scatter ``world - 1`` ranks send each row to its owner; an all-reduce also sends each row from its
        owner to ``world - 1`` ranks.
        """
        totals = [self.codec.plan(layout, "scatter").total]
        if kind == "all_reduce":
            totals.append(self.codec.plan(layout, "gather").total)
        known = [total for total in totals if total is not None]
        return (self.ranks.world - 1) * sum(known) if len(known) == len(totals) else None


def bulk(sizes: Sizes) -> bool:
    """Whether messages between two ranks are large on average; all ranks know all sizes, so they agree."""
    return sum(size or 0 for row in sizes for size in row) > len(sizes) * CHUNK
