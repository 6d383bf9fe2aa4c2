"""Plans: every shard is encoded once, compressed ones first, and decoding a message gives each its place back."""

from __future__ import annotations

import pytest
import torch

from gradwire.comm.collectives import Exempt, Layout
from gradwire.comm.collectives.plan import FLOAT32, Plan, adjacent
from gradwire.comm.compressors import build

SHAPES = [("a", (4, 6)), ("bias", (5,)), ("norm", (3,)), ("b", (7, 2))]
EXEMPT = Exempt(max_ndim=1)
every_granularity = pytest.mark.parametrize("granularity", ["piece", "row"])


def encoded(table, flat):
    message = torch.empty(table.sizes.total, dtype=torch.uint8)
    for batch in table.batches:
        batch.compressor.encode_many(batch.values(flat), batch.segments, message)
    return message, table.sizes.encodings


@every_granularity
@pytest.mark.parametrize("cut", [Layout.dim0, Layout.cut, Layout.packed])
def test_what_is_encoded_decodes_to_its_place(cut, granularity):
    layout = cut(SHAPES, 2)
    flat = layout.pack({name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES})
    plan = Plan.of(layout, build("bf16"), EXEMPT, granularity, 0)
    assert (plan.numel, plan.exempt_numel) == (46, 8)
    for table in (plan.whole, plan.undivided):
        message, lengths = encoded(table, flat)
        out = layout.empty(flat.device)
        table.decode(message, 1, lengths, out, "blank")
        for shard in layout.shards:
            exact = flat[shard.place]
            kept = exact if len(shard.shape) == 1 else exact.to(torch.bfloat16).float()
            assert torch.equal(out[shard.place], kept), shard


@every_granularity
def test_a_row_is_a_part_of_the_whole_message(granularity):
    layout = Layout.dim0(SHAPES, 2)
    flat = layout.pack({name: torch.ones(shape) for name, shape in SHAPES})
    plans = [Plan.of(layout, build("int8", block=4), EXEMPT, granularity, rank) for rank in range(2)]
    whole, _ = encoded(plans[0].whole, flat)
    rows = [encoded(plan.row, row)[0] for plan, row in zip(plans, flat.view(2, -1), strict=True)]
    assert torch.equal(torch.cat(rows), whole)


def test_sizes_that_depend_on_the_data_are_unknown():
    sizes = Plan.of(Layout.dim0(SHAPES, 2), build("threshold"), EXEMPT, "piece", 0).whole.sizes
    assert sizes.total is None and [None in row for row in sizes.encodings] == [True, True]
    exact = Plan.of(Layout.dim0(SHAPES, 2), FLOAT32, Exempt(), "piece", 0)
    assert exact.whole.sizes.total == 4 * 46 and len(exact.whole.batches) == 1


def test_float32_shards_without_a_gap_travel_as_one():
    shards = Layout.packed(SHAPES, 1).shards
    assert adjacent(shards) == [shards]
    assert adjacent([shards[0], *shards[2:]]) == [shards[:1], shards[2:]]
