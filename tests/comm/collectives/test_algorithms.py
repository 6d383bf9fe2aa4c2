"""gather, native, error feedback and rows on a reducer alone; what `auto` chooses.

That each compressor gives what its protocol says is tested with the strategies (`parallel/test_protocols.py`).

Of `comm/closed_forms.py`.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from diagonals import diagonals
from test_reducer import CUTS, SHAPES, buffer, gradients

from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.closed_forms import raw_bytes
from gradwire.comm.collectives import Exempt, Layout, Reducer
from gradwire.comm.collectives.algorithms import ALGORITHMS, Ranks
from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.meter import Meter
from gradwire.comm.collectives.reducer import check_options, payload
from gradwire.comm.compressors import build

BIG = [("matrix", (24, 20)), ("bias", (7,)), ("wide", (3, 130)), ("cube", (4, 5, 6)), ("long", (700,))]


def big_gradients(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    return {name: torch.randn(shape, generator=generator) + 0.01 for name, shape in BIG}


def reduced(rank, world, group, shapes, cut, kind, name, options, reducer_options, steps):
    """The results of a few steps, the bytes of each, and what is left over."""
    layout = CUTS[cut](shapes, world)
    reducer = Reducer(build(name, **options), group, **reducer_options)
    rows = []
    for step in range(steps):
        before, expected = reducer.traffic, reducer.closed_form(layout, kind)
        flat = layout.pack(big_gradients(rank, step) if shapes == BIG else gradients(rank, step))
        result = getattr(reducer, kind)(flat, layout)
        assert reducer.finish()
        rows.append((result, reducer.traffic["sent"] - before["sent"], expected))
    residuals = {key: feedback.residual for key, feedback in reducer.codec.feedbacks.items()}
    return rows, residuals, reducer.traffic, reducer.algorithm


TELESCOPING = [
    ("int8", {"algorithm": "exchange"}),
    ("signsgd", {"algorithm": "exchange", "granularity": "row"}),
    ("topk+int8", {"algorithm": "exchange", "second": "float32"}),
    ("topk+int8", {"algorithm": "exchange", "exempt": Exempt(max_ndim=1), "dense_steps": 2}),
    ("int8", {"algorithm": "gather"}),
    ("powersgd", {}),
    ("int8", {"algorithm": "native"}),
]
KINDS = ["reduce_scatter", "all_reduce"]


@pytest.mark.parametrize(("case", "size", "cut", "kind"), diagonals(TELESCOPING, [2, 3, 4], CUTS, KINDS), ids=str)
def test_error_feedback_telescopes(turns, case, size, cut, kind):
    """The delivered mean is the exact one, less the mean of the workers' residuals and less the owners' own."""
    name, reducer_options = case
    layout, steps = CUTS[cut](BIG, size), 5
    options = {"error_feedback": True, **reducer_options}
    results = turns(size).run(reduced, BIG, cut, kind, name, {}, options, steps)
    shards = {(shard.name, shard.at): shard for shard in layout.shards}
    exact = sum(layout.pack(big_gradients(rank, step)).double() for rank in range(size) for step in range(steps)) / size
    left = torch.zeros(layout.numel, dtype=torch.float64)
    lost = 0.0
    for _, residuals, _, _ in results:
        for (parameter, phase, at), residual in residuals.items():
            share = size if phase == "scatter" else 1
            native = results[0][3] == "native"
            for shard in layout.parameters[parameter] if native else [shards[parameter, at]]:
                left[shard.place] += (residual[shard.source] if native else residual).double() / share
            lost += float(residual.abs().sum())
    parts = [[row[0] for row in result[0]] for result in results]
    if kind == "reduce_scatter":
        delivered = torch.cat([sum(part.double() for part in own) for own in parts])
    else:
        delivered = sum(part.double() for part in parts[0])
    assert (delivered + left - exact).abs().max() < 2e-5 * exact.abs().max() * steps
    assert lost > 0, "a lossy method leaves something"


def all_maximal(rank, world, group, value):
    layout = Layout.dim0(SHAPES, world)
    reducer = Reducer(build("int8"), group, algorithm="native")
    flat = layout.pack({name: torch.full(shape, value) for name, shape in SHAPES})
    return flat, reducer.all_reduce(flat, layout), reducer.reduce_scatter(flat, layout)


@pytest.mark.parametrize("value", [3.0, -1e30])
def test_the_sum_of_int8_codes_does_not_overflow(turns, value):
    """Every rank sends the largest code of one sign, everywhere; a sum of four of 127 would wrap around."""
    results = turns(4).run(all_maximal, value)
    for flat, full, _ in results:
        torch.testing.assert_close(full, flat, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.cat([row for *_, row in results]), results[0][0], rtol=1e-6, atol=0)


def poisoned_once(rank, world, group, options):
    """Of three steps, the second with NaN on rank 0: the answers, the last mean, and residuals after the second."""
    layout = Layout.dim0(SHAPES, world)
    reducer = Reducer(build("int8"), group, algorithm="exchange", error_feedback=True, nonfinite="skip", **options)
    finite, residuals = [], {}
    for step in range(3):
        flat = buffer(layout, rank, step)
        if (rank, step) == (0, 1):
            flat[0] = math.nan
        mean = reducer.reduce_scatter(flat, layout)
        finite.append(reducer.finish())
        if step == 1:
            kept = {key: feedback.residual for key, feedback in reducer.codec.feedbacks.items()}
            residuals = {key: bool(residual.any()) for key, residual in kept.items() if residual.numel() > 1}
    return finite, mean, reducer.traffic.details["residuals_dropped"], residuals


@pytest.mark.parametrize(
    "options",
    [
        *({"residual_dtype": dtype} for dtype in ("float32", "bf16", "int8")),
        {"ef_average": 0.5},
        {"ef_average": 0.5, "granularity": "row"},
    ],
    ids=str,
)
def test_a_residual_is_dropped_where_the_gradient_was_not_finite(turns, options):
    together = [shard for shard in Layout.dim0(SHAPES, 2).rows[0] if "granularity" in options or shard.start == 0]
    results = turns(2).run(poisoned_once, options)
    assert [result[0] for result in results] == [[True, False, True]] * 2
    assert all(result[1].isfinite().all() for result in results)
    assert [result[2] for result in results] == [len(together), 0]
    for rank, (*_, residuals) in enumerate(results):
        dropped = {(shard.name, "scatter", shard.at) for shard in together if shard.numel > 1 and rank == 0}
        assert {key for key, kept in residuals.items() if not kept} == dropped


@pytest.mark.parametrize(
    ("name", "size", "kind", "numel", "expected"),
    [
        ("int8", 2, "all_reduce", 10**6, "gather"),
        ("int8", 3, "all_reduce", 10**6, "exchange"),
        ("int8", 3, "all_reduce", 10**4, "gather"),
        ("none", 3, "all_reduce", 10**3, "exchange"),  # a gather would send more than float32's all-reduce
        ("int8", 2, "reduce_scatter", 10**6, "exchange"),
        ("powersgd", 3, "all_reduce", 10**6, "native"),
        ("powersgd", 2, "reduce_scatter", 10**6, "native"),
        ("bf16", 2, "reduce_scatter", 10**6, "exchange"),
        ("threshold", 3, "all_reduce", 10, "exchange"),
    ],
)
def test_auto_chooses(turns, name, size, kind, numel, expected):
    assert turns(size).run(chosen, name, kind, numel) == [expected] * size


def chosen(rank, world, group, name, kind, numel):
    reducer = Reducer(build(name), group)
    reducer.prepare(kind, numel)
    return reducer.algorithm


def scheduled(rank, world, group):
    reducer = Reducer({"method": "powersgd", "rank": 1}, group, schedule={"rank": {2: 3}})
    layout, rows = Layout.dim0(BIG, world), []
    for step in range(4):
        before, expected = reducer.traffic["sent"], reducer.closed_form(layout, "all_reduce")
        reducer.all_reduce(layout.pack(big_gradients(rank, step)), layout)
        rows.append((reducer.traffic["sent"] - before, expected))
        reducer.finish()
    return rows


def test_a_schedule_changes_the_compressor_and_its_state(turns):
    results = turns(2).run(scheduled)
    for step, rows in enumerate(zip(*results, strict=True)):
        expected = 2 * sum(build("powersgd", rank=1 if step < 2 else 3).round_bytes(form) for form in FORMS)
        assert sum(sent for sent, _ in rows) == sum(closed_form for _, closed_form in rows) == expected


FORMS = [(shape[0], math.prod(shape[1:])) if len(shape) > 1 else shape for _, shape in BIG]


def test_float32_natively_costs_what_an_all_reduce_costs(turns):
    results = turns(3).run(reduced, BIG, "dim0", "all_reduce", "none", {}, {"algorithm": "native"}, 1)
    numel = sum(math.prod(shape) for _, shape in BIG)
    assert sum(rows[0][2] for rows, *_ in results) == raw_bytes("all_reduce", numel, 3)


def test_a_methods_first_steps_follow_the_dense_ones(turns):
    """gradiveq sums all elements for two steps, and coefficients from the third on."""
    options, dense = {"window": 2, "slice": 8, "components": 2}, 2
    results = turns(2).run(
        reduced, BIG, "dim0", "all_reduce", "gradiveq", options, {"algorithm": "native", "dense_steps": dense}, 6
    )
    sent = [sum(sent for _, sent, _ in rows) for rows in zip(*(result[0] for result in results), strict=True)]
    assert all(sent == expected for rows, *_ in results for _, sent, expected in rows)
    assert sent[0] == sent[dense] > sent[dense + 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ["exchange", "gather", "native"])
def test_the_bytes_of_float32_values_are_counted(turns, kind, algorithm):
    """After a step of float32 rank-1 factors replace the matrices that they shorten; the biases are exempt."""
    options = {"algorithm": algorithm, "exempt": Exempt(max_ndim=1), "dense_steps": 1}
    results = turns(3).run(reduced, BIG, "dim0", kind, "powersgd", {"rank": 1}, options, 2)
    traffic = [result[2] for result in results]
    numel, vectors = sum(math.prod(shape) for _, shape in BIG), sum(shape[0] for _, shape in BIG if len(shape) == 1)
    shards = [form for shard in Layout.dim0(BIG, 3).shards for form in [shard.form] if len(form) > 1]
    small = [form for form in shards if sum(form) >= math.prod(form)]
    float32 = numel + vectors + (0 if algorithm == "native" else sum(map(math.prod, small)))
    passes = 3 if algorithm == "gather" else 1 + KINDS.index(kind)
    assert sum(rank["exact"] for rank in traffic) == passes * 2 * 4 * float32
    for rank in traffic:
        assert rank["exact"] < rank["sent"] and rank["ratio"] == rank["raw"] / rank["sent"]
        assert algorithm == "gather" or rank["sent"] < rank["raw"]  # three ranks send each other all of it
        assert rank["messages"] == sum(cost["calls"] for cost in rank.details["by_op"].values()) > 0
        assert {*rank} == {"sent", "raw", "ratio", "messages", "exact"} and not rank.details.keys() & rank.keys()


def by_row_and_packed(rank, world, group, name, options):
    """The means, bytes and residuals of some steps in a layout by rows, and in one by parameters."""
    outcomes = []
    for cut in (Layout.dim0, Layout.packed):
        layout = cut(BIG, world)
        reducer = Reducer(build(name), group, **options)
        means = []
        for step in range(3):
            out = {name: torch.zeros(shape) for name, shape in BIG}
            mean = reducer.all_reduce(layout.pack(big_gradients(rank, step)), layout)
            layout.unpack(mean, out)
            reducer.finish()
            means += [*out.values()]
        kept = {key: feedback.residual for key, feedback in reducer.codec.feedbacks.items()}
        given = reducer.traffic | reducer.traffic.details
        counts = {key: given[key] for key in ("sent", "raw", "exact", "closed_form", "elements", "exempt_elements")}
        outcomes.append((means, counts, kept))
    (means, counts, kept), (means_packed, counts_packed, kept_packed) = outcomes
    assert counts == counts_packed and kept.keys() == kept_packed.keys()
    pairs = [*zip(means, means_packed, strict=True), *((kept[key], kept_packed[key]) for key in kept)]
    return max(float((one - other).abs().max()) for one, other in pairs)


PACKED = [
    ("int8", {"algorithm": "exchange", "error_feedback": True}),
    ("int8", {"algorithm": "gather", "error_feedback": True, "exempt": Exempt(max_ndim=1)}),
    ("topk", {"algorithm": "exchange", "granularity": "row"}),
    ("none", {"algorithm": "gather", "dense_steps": 1}),
    ("fp16", {"algorithm": "native"}),
    ("powersgd", {"error_feedback": True}),
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("name", "options"), PACKED)
def test_a_layout_by_parameters_has_the_means_and_bytes_of_one_by_rows(turns, name, options, size):
    differences = turns(size).run(by_row_and_packed, name, options)
    native_sum = size > 2 and (name == "powersgd" or options.get("algorithm") == "native")
    assert max(differences) <= (1e-2 if native_sum else 0)


def scatters_packed(rank, world, group):
    layout = Layout.packed(BIG, world)
    try:
        Reducer("int8", group).reduce_scatter(layout.pack(big_gradients(rank)), layout)
    except RunFault as fault:
        return str(fault)


def test_a_reduce_scatter_needs_rows_that_follow_each_other(turns):
    assert all("contiguous rows" in said for said in turns(2).run(scatters_packed))


# Layers repeat their shapes. A bias is between matrices, one matrix is too small to be compressed.
LAYERS = [
    ("a", (9, 14)),
    ("bias", (5,)),
    ("b", (9, 14)),
    ("c", (14, 9)),
    ("d", (9, 14)),
    ("small", (2, 3)),
    ("e", (14, 9)),
]


EQUAL = [("a", (8, 12)), ("b", (8, 12)), ("d", (8, 12))]  # nothing but matrices of one shape, and no padding


def layer_gradients(rank, step, shapes):
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + 100 * rank + ord(name[0])))
        + 0.01
        for name, shape in shapes
    }


def at_once_and_one_by_one(rank, world, group, kind, shapes, method, options):
    """Means, residuals and bytes of a few steps: of one buffer, and of a buffer and a reducer for each parameter."""
    whole = Layout.dim0(shapes, world)
    reducer = Reducer(build(**method), group, **options)
    alone = {
        name: (Layout.dim0([(name, shape)], world), Reducer(build(**method), group, **options))
        for name, shape in shapes
    }
    means = []
    for step in range(4):
        given = layer_gradients(rank, step, shapes)
        if step == 2 and rank == 0:
            given["b"][3, 4] = math.inf
        mean = getattr(reducer, kind)(whole.pack(given), whole)
        reducer.finish()
        expected = torch.zeros_like(mean)
        for name, (layout, single) in alone.items():
            part = getattr(single, kind)(layout.pack(given), layout)
            single.finish()
            for shard, source in zip(whole.parameters[name], layout.parameters[name], strict=True):
                if kind == "all_reduce":
                    expected[shard.place] = part[source.place]
                elif shard.row == rank:
                    expected[whole.place_in_row(shard)] = part[layout.place_in_row(source)]
        means.append((mean, expected))
    singles = [single for _, single in alone.values()]
    residuals = [
        {key: feedback.residual for each in reducers for key, feedback in each.codec.feedbacks.items()}
        for reducers in ([reducer], singles)
    ]
    dropped = reducer.codec.residuals_dropped, sum(single.codec.residuals_dropped for single in singles)
    sent = reducer.traffic["sent"], sum(single.traffic["sent"] for single in singles)
    return means, residuals, dropped, sent


@pytest.mark.parametrize("shapes", [LAYERS, EQUAL], ids=["layers", "equal"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "feedback", "size"),
    [
        ({"name": "powersgd", "rank": 2}, True, 2),
        ({"name": "powersgd", "rank": 2}, True, 3),
        ({"name": "bf16"}, False, 2),  # of more ranks the sums are rounded in another order
        ({"name": "fp16"}, True, 2),
        ({"name": "none"}, False, 3),
    ],
    ids=str,
)
def test_parameters_that_are_reduced_at_once_have_the_means_of_each_alone(turns, shapes, method, feedback, size, kind):
    options = {"algorithm": "native", "error_feedback": feedback, "nonfinite": "skip"}
    results = turns(size).run(at_once_and_one_by_one, kind, shapes, method, options)
    for means, (residuals, expected), (dropped, dropped_alone), _ in results:
        for mean, of_each in means:
            torch.testing.assert_close(mean, of_each, rtol=1e-4, atol=5e-6, equal_nan=True)
        exact = {"bias", "small"} if method["name"] == "powersgd" else set()  # too small for savings
        assert {key[0] for key in residuals} == {name for name, _ in shapes if feedback and name not in exact}
        assert residuals.keys() == expected.keys() and dropped == dropped_alone
        for key, residual in residuals.items():
            torch.testing.assert_close(residual, expected[key], rtol=1e-4, atol=5e-6)
    assert any(dropped for _, _, (dropped, _), _ in results) == feedback
    at_once, one_by_one = (sum(result[-1][way] for result in results) for way in (0, 1))
    assert 0 < at_once <= one_by_one  # which pads the rows of each parameter


def in_changing_buffers(rank, world, group, name, options):
    """Means and residuals of parameters that share other buffers from step to step, and that each have one."""
    groupings = [[LAYERS], [LAYERS[:3], LAYERS[3:]], [LAYERS], [LAYERS[:1], LAYERS[1:5], LAYERS[5:]], [LAYERS]]
    layouts = {tuple(shapes): Layout.packed(shapes, world) for grouping in groupings for shapes in grouping}
    layouts |= {(named,): Layout.packed([named], world) for named in LAYERS}
    results = []
    for buffers in (groupings, [[[named] for named in LAYERS]] * len(groupings)):
        reducer, means = Reducer(build(name), group, error_feedback=True, **options), []
        for step, grouping in enumerate(buffers):
            given, mean = layer_gradients(rank, step, LAYERS), {}
            for shapes in grouping:
                layout = layouts[tuple(shapes)]
                flat = reducer.all_reduce(layout.pack(given), layout)
                mean |= {(shard.name, shard.at): flat[shard.place] for shard in layout.shards}
            reducer.finish()
            means.append(mean)
        results.append((means, {key: kept.residual for key, kept in reducer.codec.feedbacks.items()}))
    return results


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int8", {"algorithm": "exchange"}),
        ("topk+int8", {"algorithm": "gather", "residual_dtype": "bf16"}),
        ("fp16", {"algorithm": "native", "ef_average": 0.5}),
    ],
    ids=str,
)
def test_residuals_follow_parameters_into_other_buffers(turns, name, options):
    for (means, residuals), (expected, of_each) in turns(2).run(in_changing_buffers, name, options):
        for mean, alone in zip(means, expected, strict=True):
            assert mean.keys() == alone.keys() and all(torch.equal(mean[key], alone[key]) for key in mean)
        assert residuals.keys() == of_each.keys() and any(residual.any() for residual in residuals.values())
        assert all(torch.equal(residual, of_each[key]) for key, residual in residuals.items())


@pytest.mark.parametrize(
    ("compressor", "kind", "options", "expected"),
    [
        # int8 of rows of 8, 8, 8 and 6 by 7, and twice 3, 3, 3 and 2: a byte each, 4 more per shard, or per row
        ("int8", "reduce_scatter", {}, ("exchange", 3 * (226 + 2 * 27))),
        ("int8", "reduce_scatter", {"granularity": "row"}, ("exchange", 3 * (232 + 4 * 4))),
        ("int8", "all_reduce", {"algorithm": "exchange", "dense_steps": 9}, ("exchange", 2 * 3 * (226 + 2 * 27))),
        ("int8", "all_reduce", {"algorithm": "exchange", "second": "float32"}, ("exchange", 3 * (226 + 54 + 4 * 232))),
        ("int8", "all_reduce", {}, ("gather", 3 * 4 * (226 + 2 * 27))),  # so small that one message is enough
        ("bf16", "all_reduce", {"algorithm": "native"}, ("native", 2 * 3 * 2 * 232)),
        ("threshold", "reduce_scatter", {}, ("exchange", None)),
    ],
)
def test_bytes_are_known_without_ranks(compressor, kind, options, expected):
    assert payload(compressor, {(30, 7): 1, (11,): 2}, kind, 4, **options) == expected


def test_bytes_of_parameters_that_are_exempt_by_name_are_refused():
    with pytest.raises(BadInput, match="exempt has names, and bytes are predicted of shapes"):
        payload("int8", {(30, 7): 1}, "all_reduce", 4, exempt={"names": ["*bias"]})


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("compressor", "options"),
    [
        ("topk+int8", {"algorithm": "exchange", "exempt": Exempt(max_ndim=1)}),
        ("int8", {"algorithm": "exchange", "granularity": "row", "second": "float32"}),
        ("int8", {"algorithm": "gather"}),
        ("powersgd", {"algorithm": "native"}),
        ({"method": "signsgd", "scale": "none"}, {"algorithm": "native", "exempt": Exempt(max_ndim=1)}),
        ("threshold", {"algorithm": "exchange"}),
        ("threshold", {"algorithm": "gather"}),
    ],
    ids=str,
)
def test_the_bytes_of_all_ranks_are_the_sum_of_each_ranks(compressor, options, kind, world):
    """The last of three ranks has a shorter shard of the matrix, and the last of five none of the bias."""
    schedule, checked = check_options(compressor, **options)
    codec = Codec(schedule, checked, counts=Counter(), seed=0, rank=0, draws=0)
    forms = [ALGORITHMS[checked.algorithm](codec, Ranks(world, rank, Meter())) for rank in range(world)]
    for cut in CUTS.values():
        layout = cut(SHAPES, world)
        each = [form.closed_form(layout, kind) for form in forms]
        totals = {form.closed_total(layout, kind) for form in forms}
        if compressor == "threshold":
            assert {*each} == totals == {None}
        else:
            assert totals == {sum(each)} and sum(each) > 0
