"""Gather: every rank sends its encodings of the whole buffer to all ranks, which decode and average them.

One encoding and one collective instead of two, for ``world / 2`` times the bytes: useful with two ranks, and for models
so small that latency dominates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.comm.collectives import ops
from gradwire.comm.collectives.algorithm import Algorithm, Kind
from gradwire.comm.collectives.layout import Layout
from gradwire.comm.collectives.messages import exchange


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
        table = codec.plan(layout, "scatter").whole
        sizes = [[size for row in table.sizes for size in row]]
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, lengths = codec.encode(flat, table, "scatter", lambda _: ranks.world - 1)
        own = [[length for row in lengths for length in row]] * ranks.world
        if table.total is None:
            copies, known = torch.cat([message] * ranks.world), sizes * ranks.world
            incoming, own = exchange(copies, own, known, known, ranks)
        else:
            bulk = message.numel() > ops.CHUNK
            incoming = ops.all_gather(message, ranks.group, "payload", ranks.meter, bulk=bulk).view(-1)
        with ranks.meter.span("decode", "codec", device=flat.device):
            mean = torch.zeros(layout.numel, dtype=torch.float32, device=flat.device)
            table.decode(incoming, own, mean, "zero")
            return mean.div_(ranks.world)

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the payload bytes over all ranks: every rank sends its encodings to all others."""
        total, world = self.codec.plan(layout, "scatter").total, self.ranks.world
        return None if total is None else world * (world - 1) * total
