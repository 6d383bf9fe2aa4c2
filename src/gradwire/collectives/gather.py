"""Gather: every rank sends its encodings of the whole buffer to all ranks, which decode and average them.

One encoding and one collective instead of two, for ``world / 2`` times the bytes: useful with two ranks, and for models
so small that latency dominates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives import ops
from gradwire.collectives.algorithm import Algorithm, Kind
from gradwire.collectives.layout import Layout
from gradwire.collectives.messages import exchange


class Gather(Algorithm):
    """Meant for all-reduces; a reduce-scatter discards all rows but this rank's."""

    name = "gather"

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Tensor:
        """All-reduce, and return this rank's row."""
        row = self.ranks.rank * layout.row_numel
        return self.mean_everywhere(flat, layout)[row : row + layout.row_numel].clone()

    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Tensor:
        """Encode everything, gather, decode and average, summed in rank order."""
        codec, ranks = self.codec, self.ranks
        segments = [segment for row in codec.plan(layout, "scatter").rows for segment in row]
        sizes = [segment.size for segment in segments]
        with ranks.meter.span("encode", "codec", device=flat.device):
            own = [codec.encode(segment.take(flat), segment, "scatter", ranks.world - 1) for segment in segments]
        if None in sizes:
            incoming = exchange([own] * ranks.world, [sizes] * ranks.world, [sizes] * ranks.world, flat.device, ranks)
        else:
            message = torch.cat([torch.empty(0, dtype=torch.uint8, device=flat.device), *own])
            bulk = message.numel() > ops.CHUNK
            gathered = ops.all_gather(message, ranks.group, "payload", ranks.meter, bulk=bulk)
            incoming = [list(row.split([wire.numel() for wire in own])) for row in gathered]
        with ranks.meter.span("decode", "codec", device=flat.device):
            mean = torch.zeros(layout.numel, dtype=torch.float32, device=flat.device)
            for wires in incoming:
                for segment, wire in zip(segments, wires, strict=True):
                    for part, value in zip(segment.take(mean), segment.decode(wire), strict=True):
                        part += value
            return mean.div_(ranks.world)

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the payload bytes over all ranks: every rank sends its encodings to all others."""
        total, world = self.codec.plan(layout, "scatter").total, self.ranks.world
        return None if total is None else world * (world - 1) * total
