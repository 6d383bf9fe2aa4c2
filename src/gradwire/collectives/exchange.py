"""Exchange: every rank sends each row's encodings to the row's owner, which decodes, sums in float32 and divides once.

An all-reduce then sends each owner's means to all ranks, encoded again or as float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.algorithm import Algorithm, Kind
from gradwire.collectives.layout import Layout
from gradwire.collectives.messages import exchange
from gradwire.collectives.ops import CHUNK
from gradwire.collectives.plan import Sizes


class Exchange(Algorithm):
    """Works with every compressor."""

    name = "exchange"

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Tensor:
        """Encode all rows and send them to their owners; decode and average this rank's row."""
        codec, ranks = self.codec, self.ranks
        plan = codec.plan(layout, "scatter")
        segments, sizes = plan.rows, plan.sizes
        with ranks.meter.span("encode", "codec", device=flat.device):
            outgoing = [
                [codec.encode(segment.take(flat), segment, "scatter", int(row != ranks.rank)) for segment in of_row]
                for row, of_row in enumerate(segments)
            ]
        incoming = exchange(outgoing, sizes, [sizes[ranks.rank]] * ranks.world, flat.device, ranks, bulk=bulk(sizes))
        with ranks.meter.span("decode", "codec", device=flat.device):
            mean = torch.zeros(layout.row_numel, dtype=torch.float32, device=flat.device)
            for wires in incoming:  # summed in rank order
                for segment, wire in zip(segments[ranks.rank], wires, strict=True):
                    values = segment.decode(wire)
                    for part, value in zip(segment.take(mean, ranks.rank * layout.row_numel), values, strict=True):
                        part += value
            return mean.div_(ranks.world)

    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Tensor:
        """Reduce-scatter, then gather the means; all ranks use the decoded values, the owner too."""
        codec, ranks = self.codec, self.ranks
        mean = self.mean_of_row(flat, layout)
        plan = codec.plan(layout, "gather")
        segments, sizes = plan.rows, plan.sizes
        with ranks.meter.span("encode", "codec", device=flat.device):
            shift = ranks.rank * layout.row_numel
            own = [
                codec.encode(each.take(mean, shift), each, "gather", ranks.world - 1) for each in segments[ranks.rank]
            ]
        known = [sizes[ranks.rank]] * ranks.world
        incoming = exchange([own] * ranks.world, known, sizes, mean.device, ranks, bulk=bulk(sizes))
        with ranks.meter.span("decode", "codec", device=flat.device):
            full = torch.zeros(layout.numel, dtype=torch.float32, device=mean.device)
            for of_row, wires in zip(segments, incoming, strict=True):
                for segment, wire in zip(of_row, wires, strict=True):
                    for part, value in zip(segment.take(full), segment.decode(wire), strict=True):
                        part.copy_(value)
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
