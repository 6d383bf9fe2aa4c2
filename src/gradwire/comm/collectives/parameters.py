"""Compressed all-gather of sharded parameters.

FSDP gathers most parameters for the forward pass and again for the backward pass, and reduces their gradients once: two
thirds of its traffic are parameters. Quantizing them for communication only, with exact shards, is "qwZ" in Wang et
al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (arXiv:2306.10209, 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.closed_forms import FLOAT32_BYTES, total_bytes
from gradwire.comm.collectives.algorithms import Ranks, gather_rows
from gradwire.comm.collectives.layout import Layout
from gradwire.comm.collectives.meter import METER, Meter
from gradwire.comm.collectives.ops import Group
from gradwire.comm.collectives.plan import FLOAT32, Plan
from gradwire.comm.collectives.queue import run
from gradwire.comm.compressors import build
from gradwire.comm.compressors.driver import Onto
from gradwire.comm.reduction import encoding_of


class ParameterGather:
    """Gathers the rows of a layout; every rank decodes all of them, its own too, so that all use the same weights.

    Args:
        encoding: A key of `comm.reduction.ENCODINGS`.
        group: The ranks; None is the default group.
        meter: Counts the bytes and the codec's time, as ``parameters``.

    Attributes:
        raw: Bytes that this rank would have sent as float32, of what was counted by `count`.

    Raises:
        BadInput: If the encoding is unknown.
    """

    def __init__(self, encoding: str, group: Group = None, meter: Meter = METER) -> None:
        self.encoding = encoding_of(encoding)
        self.compressor = build(self.encoding.method, **self.encoding.options)
        self._plans: WeakKeyDictionary[Layout, dict[bool, Plan]] = WeakKeyDictionary()
        self.group = group
        self.ranks = Ranks(dist.get_world_size(group), dist.get_rank(group), meter)
        self.raw = 0

    def plan(self, layout: Layout, exact: bool) -> Plan:
        """Return the cached plan of a layout, exact or compressed."""
        plans = self._plans.setdefault(layout, {})
        if exact not in plans:
            compressor = FLOAT32 if exact else self.compressor
            plans[exact] = Plan.of(layout, compressor, self.encoding.exempt, "piece", self.ranks.rank)
        return plans[exact]

    def count(self, layout: Layout) -> None:
        """Count a gather that a framework asks for, whether or not anything is sent for it."""
        row = sum(shard.numel for shard in layout.rows[self.ranks.rank])
        self.raw += (self.ranks.world - 1) * FLOAT32_BYTES * row

    def __call__(self, full: Tensor, layout: Layout, *, exact: bool = False) -> None:
        """Fill all rows of ``full``, a buffer of ``layout`` that holds this rank's row; padding is not changed.

        Values that are not finite arrive as such on all ranks; nothing is raised here.

        Args:
            full: float32 [world * row_numel].
            layout: The layout of ``full``.
            exact: Send everything as float32.
        """
        layout.check(full)
        self._gather(full.view(layout.world, -1)[self.ranks.rank], full, layout, exact, "blank")

    def add(self, row: Tensor, full: Tensor, layout: Layout) -> None:
        """Add all ranks' rows, as they are decoded, to ``full``; padding is not changed.

        Args:
            row: This rank's row: float32 [row_numel].
            full: float32 [world * row_numel], without a -0.0.
            layout: The layout of ``full``.
        """
        layout.check(full)
        self._gather(row, full, layout, False, "sum")

    def _gather(self, row: Tensor, full: Tensor, layout: Layout, exact: bool, onto: Onto) -> None:
        """Encode this rank's row, send it to all ranks, and decode all rows."""
        meter, plan = self.ranks.meter, self.plan(layout, exact)
        with meter.span("encode", "parameters", device=full.device):
            message = torch.empty(sum(plan.row.sizes.known), dtype=torch.uint8, device=full.device)
            for batch in plan.row.batches:
                flags = torch.zeros(len(batch.segments), dtype=torch.uint8, device=full.device)
                batch.compressor.encode_many(row, batch.segments, message, flags=flags)
        lengths = plan.row.sizes.encodings
        incoming, lengths = run(gather_rows(message, lengths, plan, self.ranks, "parameters"), self.group)
        with meter.span("decode", "parameters", device=full.device):
            plan.whole.decode(incoming, 1, lengths, full, onto)

    def closed_form(self, layout: Layout, *, exact: bool = False) -> int:
        """Return the bytes of one gather over all ranks: every row goes to all ranks but its owner."""
        total = self.plan(layout, exact).whole.sizes.total
        assert total is not None  # no method's sizes depend on the data
        return total_bytes("all_gather", total, self.ranks.world)


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
        self.values = torch.zeros(layout.numel, dtype=torch.float32, device=next(iter(shards.values())).device)
        self.reset(shards)

    @property
    def row(self) -> Tensor:
        """This rank's row: float32 [row_numel], a view."""
        return self.values.view(self.layout.world, -1)[self.gather.ranks.rank]

    def reset(self, shards: Mapping[str, Tensor]) -> None:
        """Set the replica to the ranks' exact shards, by name."""
        row = torch.zeros_like(self.row)
        for shard in self.layout.rows[self.gather.ranks.rank]:
            row[self.layout.place_in_row(shard)] = shards[shard.name].reshape(-1)
        self.restore(row)

    def restore(self, row: Tensor) -> None:
        """Set the replica to exactly the rows that all ranks pass here."""
        self.row.copy_(row)
        self.gather(self.values, self.layout, exact=True)
        self.values.add_(0.0)  # turns -0.0 into 0.0, as `ParameterGather.add` needs it

    def follow(self, row: Tensor) -> None:
        """Move the replica towards the ranks' shards.

        Args:
            row: This rank's shard as it is now: float32 [row_numel].
        """
        self.gather.add(row - self.row, self.values, self.layout)
