"""The delivered gradient against the exact mean, and what a reduction did and sent: float64 in one process.

Of `measure.py`.
"""

from __future__ import annotations

import pytest
import torch
from diagonals import swept

from gradwire.bench.training.measure import compression_error
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.meter import METER
from gradwire.comm.compressors import build

SHAPES = [("a", (7, 5)), ("b", (13,)), ("c", (3, 3)), ("d", (1,)), ("e", (11, 4))]


def layouts(size):
    """Two buffers, as a framework hands over; both have padding for 2 and 3 ranks."""
    return [Layout.dim0(SHAPES[:2], size), Layout.dim0(SHAPES[2:], size)]


def gradients(rank, size, step):
    """A rank's buffers; their padding holds what nobody may look at."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    buffers = [torch.randn(layout.numel, generator=draw) + rank for layout in layouts(size)]
    for layout, flat in zip(layouts(size), buffers, strict=True):
        flat[padding(layout)] = float("nan")
    return buffers


def padding(layout):
    """Where no shard is."""
    free = torch.ones(layout.numel, dtype=torch.bool)
    for shard in layout.shards:
        free[shard.place] = False
    return free


def reduced(rank, size, group, kind, method, options, reducer_options):
    """Two steps of which the second is looked at: the comparison, what was delivered, and the reducer's totals."""
    reducer = Reducer(build(method, **options), group, **reducer_options)
    for step in (0, 1):
        with reducer.keeping() as kept:
            flats = gradients(rank, size, step)
            means = [getattr(reducer, kind)(flat, one) for flat, one in zip(flats, layouts(size), strict=True)]
        reducer.finish()
    before = METER.sent("payload"), dict(reducer.traffic)
    found = compression_error(kept, group)
    assert (METER.sent("payload"), reducer.traffic) == before, "looking sends no payload"
    return found, means, reducer.traffic


def oracle(size, delivered):
    """Relative error, its maximum form and the cosine, from all ranks' buffers at once."""
    sides = [], []
    for index, layout in enumerate(layouts(size)):
        exact = torch.stack([gradients(rank, size, 1)[index].double() for rank in range(size)]).mean(0)
        for side, whole in zip(sides, (exact, delivered[index].double()), strict=True):
            side.append(whole[~padding(layout)])
    exact, got = map(torch.cat, sides)
    error = got - exact
    cosine = torch.dot(got, exact) / (got.norm() * exact.norm()) if got.any() else None
    return (
        float(error.norm() / exact.norm()),
        float(error.abs().max() / exact.abs().max()),
        None if cosine is None else float(cosine),
    )


CASES = [
    ("topk", {"density": 0.2}, {"algorithm": "exchange", "error_feedback": True}),
    ("int8", {}, {"algorithm": "native"}),
    ("onebit", {}, {"algorithm": "gather"}),
    ("none", {}, {"algorithm": "exchange"}),
    ("zero", {}, {"algorithm": "exchange"}),
]


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("size", [3, *swept(2)])
@pytest.mark.parametrize(("method", "options", "reducer_options"), CASES, ids=[case[0] for case in CASES])
def test_the_comparison_is_with_the_float64_mean_of_this_step_s_gradients(
    world, kind, size, method, options, reducer_options
):
    ranks = world(size).run(reduced, kind, method, options, reducer_options)
    delivered = [
        torch.cat(rows) if kind == "reduce_scatter" else rows[0] for rows in zip(*(r[1] for r in ranks), strict=True)
    ]
    expected = oracle(size, delivered)
    for found, _, _ in ranks:
        assert found[:2] == pytest.approx(expected[:2], rel=1e-6)  # an exact mean's error is of the last bits
        assert found.cos_sim == (None if method == "zero" else pytest.approx(expected[2], rel=1e-9))
    assert expected[0] == 1 if method == "zero" else expected[0] > 1e-9
    assert method == "none" or expected[0] > 1e-3


def spoilt(rank, size, group):
    """A gradient of zeros, one that is not finite, and nothing at all."""
    found = []
    for value in (0.0, float("inf") if rank else 1.0):
        reducer = Reducer(build("none"), group, algorithm="exchange", nonfinite="propagate")
        with reducer.keeping() as kept:
            reducer.all_reduce(torch.full((5,), value), "x")
        found.append(compression_error(kept, group))
    return [*found, compression_error([], group)]


def test_what_has_no_relative_error_is_null(world):
    assert world(2).run(spoilt) == [[None] * 3] * 2


@pytest.mark.parametrize(
    ("kind", "method", "options", "extra"),
    [
        ("reduce_scatter", "topk", {"algorithm": "exchange"}, 0),
        ("all_reduce", "topk", {"algorithm": "exchange"}, 1),  # the owners' means to all
        ("reduce_scatter", "threshold", {"algorithm": "exchange"}, 1),  # sizes
        ("all_reduce", "threshold", {"algorithm": "exchange"}, 3),
        ("all_reduce", "topk", {"algorithm": "gather"}, 0),
        ("all_reduce", "int8", {"algorithm": "native"}, 1),  # the common scale
        ("reduce_scatter", "powersgd", {"algorithm": "native"}, 2),  # P and Q, and vectors as they are
    ],
)
def test_collectives_beyond_one_for_each_reduction_are_extra(world, kind, method, options, extra):
    given = {"rank": 1} if method == "powersgd" else {}
    for _, _, traffic in world(2).run(reduced, kind, method, given, options):
        assert traffic.details["extra_collectives"] == 2 * 2 * extra, "two steps of two buffers"
        calls = sum(cost["calls"] for cost in traffic.details["by_op"].values())
        assert calls == traffic.details["extra_collectives"] + 2 * 2
        seconds = sum(cost["seconds"] for cost in traffic.details["by_op"].values())
        assert (traffic.details["extra_seconds"] > 0) == (extra > 0)
        assert traffic.details["extra_seconds"] < seconds


@pytest.mark.parametrize(
    ("method", "options", "kept"),
    [
        ("topk", {"algorithm": "exchange"}, lambda n: max(1, round(0.2 * n))),
        ("topk+int8", {"algorithm": "gather"}, lambda n: max(1, round(0.2 * n))),
        ("randomk", {"algorithm": "exchange"}, lambda n: max(1, round(0.2 * n))),
        ("int8", {"algorithm": "exchange"}, None),
    ],
)
def test_density_counts_what_sparsifiers_choose_from_and_what_they_send(world, method, options, kept):
    name = "topk.density" if "+" in method else "density"
    given = {} if kept is None else {name: 0.2}
    for _, _, traffic in world(2).run(reduced, "reduce_scatter", method, given, options):
        sizes = [shard.numel for layout in layouts(2) for shard in layout.shards]
        chosen, among = (0, 0) if kept is None else (2 * sum(map(kept, sizes)), 2 * sum(sizes))
        assert (traffic.details["chosen_elements"], traffic.details["sparse_elements"]) == (chosen, among)


def test_a_threshold_s_density_is_read_from_its_wire(world):
    given = {"threshold": 0.5, "scale": "absolute"}
    ranks = world(2).run(reduced, "reduce_scatter", "threshold", given, {"algorithm": "exchange"})
    for rank, (_, _, traffic) in enumerate(ranks):
        flats = [flat for step in (0, 1) for flat in gradients(rank, 2, step)]
        assert traffic.details["chosen_elements"] == sum(int((flat.abs() >= 0.5).sum()) for flat in flats)


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_a_native_reduce_scatter_are_padded_to_the_longest(world, size):
    ranks = world(size).run(reduced, "reduce_scatter", "none", {}, {"algorithm": "native"})
    rows = [[sum(shard.numel for shard in row) for row in layout.rows] for layout in layouts(size)]
    for rank, (_, _, traffic) in enumerate(ranks):
        lacking = sum(max(row) - numel for row in rows for owner, numel in enumerate(row) if owner != rank)
        assert traffic.details["padding"] == 2 * 4 * lacking
    assert sum(traffic.details["padding"] for _, _, traffic in ranks) > 0
    for _, _, traffic in world(size).run(reduced, "reduce_scatter", "none", {}, {"algorithm": "exchange"}):
        assert traffic.details["padding"] == 0
