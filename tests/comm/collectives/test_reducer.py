"""The reducer on real ranks: its mean, its bytes, its policies, its state.

Of `codec.py`, `collectives/state.py`, `comm/reduction.py`.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import get_args

import pytest
import torch

from gradwire.base.errors import BadInput, NonFiniteGradient, RunFault
from gradwire.comm.closed_forms import raw_bytes
from gradwire.comm.collectives import METER, Exempt, Layout, Reducer, ops, state
from gradwire.comm.collectives.algorithms import exchange
from gradwire.comm.collectives.plan import Sizes
from gradwire.comm.collectives.queue import run
from gradwire.comm.collectives.reducer import ALGORITHMS, check_options
from gradwire.comm.compressors import available, build
from gradwire.comm.compressors.base import Compressor, numel
from gradwire.comm.reduction import ReducerOptions

SHAPES = [("matrix", (5, 3)), ("bias", (7,)), ("scalar", (1,)), ("cube", (2, 3, 2)), ("row", (1, 4))]
NUMEL = sum(math.prod(shape) for _, shape in SHAPES)
CUTS = {"dim0": Layout.dim0, "cut": Layout.cut}
STOCHASTIC = {"rounding": "stochastic", "block": 4}
METHODS = [*((name, {}) for name in available()), ("int8", STOCHASTIC)]
FALL_BACK = {"powersgd", "gradiveq", "sketch"}  # send as float32 what they would not make shorter
CLOSE = {
    "none": 1e-6,
    "fp16": 2e-3,
    "bf16": 2e-2,
    "int8": 0.06,
}  # of the largest mean, after two encodings

worlds = pytest.mark.parametrize("size", [2, 3])
every_cut = pytest.mark.parametrize("cut", CUTS)


def gradients(rank, seed=0):
    """A rank's own gradients: distinct, none zero."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return {name: torch.randn(shape, generator=generator) + 0.01 for name, shape in SHAPES}


def buffer(layout, rank, seed=0):
    return layout.pack(gradients(rank, seed))


def exact_mean(layout, world, seed=0):
    return sum(buffer(layout, rank, seed).double() for rank in range(world)) / world


class Ragged(Compressor):
    """A test's own compressor, whose size depends on the data: values above 0, with their places."""

    name = "ragged"

    def wire_bytes(self, shape):
        return None if numel(shape) > 1 else 4 * numel(shape)

    def to_wire(self, x, generator):
        if x.numel() == 1:
            return x.view(-1).view(torch.uint8)
        places = x.view(-1).gt(0).nonzero().view(-1)
        values = x.view(-1)[places]
        return torch.cat([values.view(torch.uint8), places.to(torch.int32).view(torch.uint8)])

    def from_wire(self, wire, shape):
        if numel(shape) == 1:
            return wire.clone().view(torch.float32)
        values, places = wire.clone().chunk(2)
        dense = torch.zeros(numel(shape))
        dense[places.view(torch.int32).long()] = values.view(torch.float32)
        return dense


def compressor_of(name, options):
    return Ragged() if name == "ragged" else build(name, **options)


def both_kinds(rank, world, group, cut, name, options, reducer_options):
    """Results and costs of a reduce-scatter and an all-reduce of equal gradients, with equal generators."""
    layout = CUTS[cut](SHAPES, world)
    reducer_options = {"algorithm": "exchange", **reducer_options}
    results = {}
    for kind in ("reduce_scatter", "all_reduce"):
        reducer = Reducer(compressor_of(name, options), group, **reducer_options)
        results[kind] = getattr(reducer, kind)(buffer(layout, rank), layout)
        results[f"{kind} traffic"] = reducer.traffic
        results[f"{kind} closed form"] = reducer.closed_form(layout, kind)
        results["finite"] = reducer.finish()
    return results


def every_method(rank, world, group, cut):
    return [both_kinds(rank, world, group, cut, name, options, {}) for name, options in METHODS]


@worlds
@every_cut
def test_mean_bytes_and_padding(turns, size, cut):
    layout = CUTS[cut](SHAPES, size)
    mean = exact_mean(layout, size)
    padding = mean == 0
    for (name, _), *results in zip(METHODS, *turns(size).run(every_method, cut), strict=True):
        full = results[0]["all_reduce"]
        rows = torch.cat([result["reduce_scatter"] for result in results])
        for approximation in (full, rows):
            assert approximation.dtype == torch.float32
            if name in CLOSE:  # what the others make of a mean, their protocols tell (`parallel/test_protocols.py`)
                assert (approximation.double() - mean).abs().max() <= CLOSE[name] * mean.abs().max(), name
            assert not approximation[padding].any(), (name, "padding is 0")
        for result in results:
            assert torch.equal(result["all_reduce"], full), (name, "bit-equal on all ranks")
            assert result["finite"] is True
        check_bytes(results, layout, size)
        for rank, result in enumerate(results):
            check_fallbacks(result, layout, rank, name)


def check_fallbacks(result, layout, rank, name):
    """A shape counts as sent in float32 if an encoding of that shape is; each rank encodes all rows.

    An all-reduce encodes the own row once more.
    """
    dense = {  # some values, which are not 0
        shard: name not in ("none", "hadamard")  # a rotated element is itself; the others send it by choice
        and bytes(encoded(name, values := torch.arange(1.0, 1 + shard.numel), shard.form).numpy())
        == bytes(values.view(torch.uint8).numpy())
        for shard in layout.shards
    }
    own = [shard for shard in layout.shards if shard.row == rank]
    assert any(dense.values()) == (name in FALL_BACK)
    for kind, shards in (("reduce_scatter", layout.shards), ("all_reduce", [*layout.shards, *own])):
        traffic = result[f"{kind} traffic"]
        assert traffic.details["fallbacks"] == sum(dense[shard] for shard in shards), name
        assert traffic.details["fallback_elements"] == sum(shard.numel for shard in shards if dense[shard]), name
        given = 0 if name == "none" else sum(shard.numel for shard in shards)
        assert traffic.details["encoded_elements"] == given, name


def encoded(name, values, form):
    return build(name).encode(values.view(form), generator=torch.Generator().manual_seed(1))


def small(rank, world, group, kind, options):
    """The elements that PowerSGD sent as float32 in native sums of one step, the second of two."""
    layout = Layout.dim0(SHAPES, world)
    reducer = Reducer(build("powersgd", rank=1), group, algorithm="native", **options)
    counts = []
    for step in range(2):
        before = reducer.traffic
        getattr(reducer, kind)(buffer(layout, rank, step), layout)
        reducer.finish()
        counts.append([reducer.traffic.details[name] - before.details[name] for name in COUNTS])
    return counts


COUNTS = ("fallbacks", "fallback_elements", "encoded_elements", "exempt_elements")


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_small_tensors_that_travel_as_float32_unasked_are_counted(turns, kind):
    """Of (5, 3), (7,), (1,), (2, 6) and (1, 4) rank 1 shortens the first and the fourth: n + m < n m."""
    assert turns(2).run(small, kind, {}) == [[[3, 12, 39, 0]] * 2] * 2
    asked = {"exempt": Exempt(max_ndim=1), "dense_steps": 1}
    assert turns(3).run(small, kind, asked) == [[[0, 0, 0, 8], [1, 4, 31, 8]]] * 3


def check_bytes(results, layout, size):
    for kind, passes in (("reduce_scatter", 1), ("all_reduce", 2)):
        traffic = [result[f"{kind} traffic"] for result in results]
        assert sum(t["raw"] for t in traffic) == passes * (size - 1) * 4 * NUMEL
        for result, rank in zip(results, traffic, strict=True):
            closed_form = result[f"{kind} closed form"]
            assert closed_form == rank.details["closed_form"] in (None, rank["sent"])  # None: it is the data's
        assert all(t["sent"] == sum(cost["bytes"] for cost in t.details["by_op"].values()) for t in traffic)
        assert all(t.details["elements"] == NUMEL and t.details["exempt_elements"] == 0 for t in traffic)


@pytest.mark.parametrize(("algorithm", "passes"), [("exchange", (1, 2)), ("gather", (3, 3))])
def test_the_bytes_of_places_are_those_that_travel(turns, algorithm, passes):
    """Top-k sends places and float32 values; a rank sends nothing to itself."""
    kept = sum(build("topk", density=0.3).kept(shard.numel) for shard in Layout.dim0(SHAPES, 3).shards)
    results = turns(3).run(both_kinds, "dim0", "topk", {"density": 0.3}, {"algorithm": algorithm})
    for kind, times in zip(("reduce_scatter", "all_reduce"), passes, strict=True):
        traffic = [result[f"{kind} traffic"] for result in results]
        sent, index = sum(rank["sent"] for rank in traffic), sum(rank.details["index"] for rank in traffic)
        assert sent - index == 2 * 4 * kept * times, kind


@pytest.mark.parametrize(("name", "bytes_each"), [("none", 4), ("fp16", 2), ("bf16", 2)])
def test_closed_forms_by_hand(turns, name, bytes_each):
    results = turns(3).run(both_kinds, "dim0", name, {}, {})
    assert sum(result["reduce_scatter closed form"] for result in results) == 2 * bytes_each * NUMEL
    assert sum(result["all_reduce closed form"] for result in results) == 4 * bytes_each * NUMEL


def test_a_second_half_in_float32_sends_the_reduce_scatter_rows(turns):
    results = turns(3).run(both_kinds, "cut", "int8", STOCHASTIC, {"second": "float32"})
    assert torch.equal(results[0]["all_reduce"], torch.cat([result["reduce_scatter"] for result in results]))
    check_bytes(results, Layout.cut(SHAPES, 3), 3)
    for kind, exact in (("reduce_scatter", 0), ("all_reduce", 2 * 4 * NUMEL)):
        assert sum(result[f"{kind} traffic"]["exact"] for result in results) == exact


@pytest.mark.parametrize("exempt_ndim", [0, 1])
def test_sizes_travel_only_where_they_depend_on_the_data(turns, exempt_ndim):
    layout = Layout.dim0(SHAPES, 3)
    results = turns(3).run(both_kinds, "dim0", "ragged", {}, {"exempt": Exempt(max_ndim=exempt_ndim)})
    rows = torch.cat([result["reduce_scatter"] for result in results])
    expected = sum(buffer(layout, rank).clamp_min(0) for rank in range(3)) / 3
    exact = [shard for shard in layout.shards if shard.numel == 1 or len(shard.shape) <= exempt_ndim]
    for shard in exact:
        expected[shard.place] = exact_mean(layout, 3)[shard.place].float()
    torch.testing.assert_close(rows, expected)
    for rank, result in enumerate(results):
        assert result["reduce_scatter closed form"] is result["reduce_scatter traffic"].details["closed_form"] is None
        ragged = [shard for shard in layout.shards if shard not in exact and shard.row != rank]
        kept = sum(int((buffer(layout, rank)[shard.place] > 0).sum()) for shard in ragged)
        fixed = sum(4 * shard.numel for shard in exact if shard.row != rank)
        assert result["reduce_scatter traffic"]["sent"] == 8 * kept + fixed + 8 * len(ragged)
        assert result["reduce_scatter traffic"].details["by_op"]["all_to_all"]["calls"] == 2


def test_exempt_parameters_travel_as_float32(turns):
    layout = Layout.dim0(SHAPES, 2)
    results = turns(2).run(both_kinds, "dim0", "int8", {}, {"exempt": Exempt(max_ndim=1)})
    mean = exact_mean(layout, 2)
    for shard in layout.shards:
        error = (results[0]["all_reduce"].double() - mean)[shard.place].abs().max()
        assert (error < 1e-6) == (len(shard.shape) == 1), shard
    for result in results:
        traffic = result["all_reduce traffic"]
        assert (traffic.details["exempt_elements"], traffic.details["elements"]) == (8, NUMEL)
        assert traffic["sent"] == result["all_reduce closed form"]
    assert sum(result["all_reduce traffic"]["exact"] for result in results) == 2 * 4 * 8, "to the owners and back"


def steps(rank, world, group, count, reducer_options):
    """Errors and bytes of a few optimizer steps."""
    layout = Layout.dim0(SHAPES, world)
    reducer = Reducer(build("int8"), group, algorithm="exchange", **reducer_options)
    rows = []
    for step in range(count):
        before, closed_form = reducer.traffic["sent"], reducer.closed_form(layout, "all_reduce")
        full = reducer.all_reduce(buffer(layout, rank, step), layout)
        error = (full.double() - exact_mean(layout, world, step)).abs().max().item()
        rows.append((error, reducer.traffic["sent"] - before, closed_form))
        reducer.finish()
    return rows


def test_dense_steps_send_float32_first(turns):
    results = turns(2).run(steps, 4, {"dense_steps": 2})
    for step, rows in enumerate(zip(*results, strict=True)):
        dense = step < 2
        assert all((error < 1e-6) == dense for error, _, _ in rows)
        assert all(sent == closed_form for _, sent, closed_form in rows)
        assert (sum(sent for _, sent, _ in rows) == raw_bytes("all_reduce", NUMEL, 2)) == dense


def poisoned(rank, world, group, policy, kind, bad):
    """Two steps, the first with a value on one rank only that is not finite."""
    layout = Layout.dim0(SHAPES, world)
    reducer = Reducer(build("int8"), group, nonfinite=policy)
    flat = buffer(layout, rank)
    if rank == world - 1:
        flat[0] = bad
    getattr(reducer, kind)(flat, layout)
    try:
        first = reducer.finish()
    except NonFiniteGradient as error:
        first = (str(error), error.step)
    getattr(reducer, kind)(buffer(layout, rank), layout)
    finite, counts = reducer.finish(), reducer.traffic.details
    return first, finite, counts["nonfinite_steps"], counts["agreement"], reducer.step


@worlds
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("policy", ["raise", "skip", "propagate"])
def test_all_ranks_agree_on_what_one_rank_met(turns, size, policy, kind):
    results = turns(size).run(poisoned, policy, kind, math.nan)
    first, second, count, _, step = results[0]
    if policy == "raise":
        message, last_step = first
        assert "optimizer step 1" in message and "int8" in message and last_step == 0
    else:
        assert first is (policy == "propagate")
    assert (second, count, step) == (True, 1, 2)
    assert [result[:3] for result in results] == [results[0][:3]] * size
    assert sum(result[3] for result in results) == 2 * raw_bytes("all_reduce", 1, size) // 4, "one byte per step"


def poisoned_shards(rank, world, group, options):
    """Whether each step finished: each has NaN at the end of another shard on the last rank, the last step nowhere.

    No residual keeps a NaN, or the last step would not finish.
    """
    layout = Layout.dim0(SHAPES, world)
    reducer = Reducer(build("int8"), group, nonfinite="skip", **options)
    finished = []
    for shard in [*layout.shards, None]:
        flat = buffer(layout, rank)
        if rank == world - 1 and shard is not None:
            flat[shard.place.stop - 1] = math.nan
        reducer.all_reduce(flat, layout)
        finished.append(reducer.finish())
    return finished


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "exchange"},
        {"algorithm": "gather", "error_feedback": True},
        {"granularity": "row", "error_feedback": True, "residual_dtype": "bf16"},
        {"exempt": Exempt(max_ndim=1)},
    ],
    ids=str,
)
def test_a_value_that_is_not_finite_is_met_in_every_shard(turns, options):
    first, *others = turns(2).run(poisoned_shards, options)
    assert len(first) > len(SHAPES) and first == [False] * (len(first) - 1) + [True]
    assert others == [first]


def test_overflow_of_the_wire_counts_as_not_finite(turns):
    def first_answers(bad):
        return [result[0] for result in turns(2).run(poisoned, "skip", "reduce_scatter", bad)]

    assert first_answers(math.inf) == [False, False]
    assert first_answers(1e30) == [True, True]  # int8 carries it; fp16 is tested with the compressors


def by_name(rank, world, group):
    flat = gradients(rank)["matrix"].view(-1)
    reducer = Reducer(build("none"), group)
    return reducer.all_reduce(flat, "matrix"), reducer.reduce_scatter(flat, "matrix")


@worlds
def test_a_name_is_one_vector(turns, size):
    mean = sum(gradients(rank)["matrix"].view(-1) for rank in range(size)) / size
    row = -(-15 // size)
    for rank, (full, shard) in enumerate(turns(size).run(by_name)):
        torch.testing.assert_close(full, mean)
        assert shard.shape == (row,)
        torch.testing.assert_close(shard[: mean[rank * row :].numel()], mean[rank * row : (rank + 1) * row])


def alone(rank, world, group):
    layout = Layout.dim0(SHAPES, 1)
    reducer = Reducer(build("int8"), group)
    flat = buffer(layout, 0)
    flat[0] = math.nan
    scattered, full = reducer.reduce_scatter(flat, layout), reducer.all_reduce(flat, layout)
    return flat, scattered, full, reducer.finish(), reducer.traffic, reducer.codec.state_dict()


def test_one_rank_is_the_identity(turns):
    [(flat, scattered, full, finite, traffic, state)] = turns(1).run(alone)
    torch.testing.assert_close(scattered, flat, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(full, flat, rtol=0, atol=0, equal_nan=True)
    assert finite is True
    assert not any((traffic | traffic.details).values()) and not state["generators"]


def resumed(rank, world, group, name, options, reducer_options):
    """Four steps at a stretch; and two, a new reducer, two."""
    layout = Layout.dim0(SHAPES, world)

    def run(reducer, some):
        results = []
        for step in some:
            results.append(reducer.all_reduce(buffer(layout, rank, step), layout))
            reducer.finish()
        return results

    def new():
        return Reducer(build(name, **options), group, seed=3, dense_steps=1, **reducer_options)

    unbroken = run(new(), range(4))
    first = new()
    broken = run(first, range(2))
    second = new()
    second.load_state_dict(first.state_dict())
    third = new()
    run(third, range(5, 8))  # which leaves nothing
    third.load_state_dict(second.state_dict())  # saved again before any use
    broken += run(third, range(2, 4))
    return unbroken, broken


@worlds
@pytest.mark.parametrize(
    ("name", "options", "reducer_options"),
    [
        ("int8", STOCHASTIC, {"algorithm": "exchange"}),
        ("int8", STOCHASTIC, {"error_feedback": True}),
        ("powersgd", {"rank": 1}, {"error_feedback": True}),
        ("signsgd", {"block": 4}, {"error_feedback": True, "granularity": "row", "algorithm": "exchange"}),
    ],
    ids=str,
)
def test_a_resumed_reducer_equals_an_unbroken_one(turns, size, name, options, reducer_options):
    for unbroken, broken in turns(size).run(resumed, name, options, reducer_options):
        for one, other in zip(unbroken, broken, strict=True):
            assert torch.equal(one, other)
        assert not torch.equal(unbroken[2], unbroken[3])


def loaded_late(rank, world, group):
    """Step 2 by the reducer that made steps 0 and 1, and by one that was prepared, used and met NaN before it loads."""
    layout = Layout.dim0(SHAPES, world)

    def new():
        return Reducer(build("int8", **STOCHASTIC), group, seed=3, error_feedback=True, nonfinite="skip")

    first, late = new(), new()
    first.prepare("reduce_scatter", NUMEL)
    late.prepare("all_reduce", NUMEL)
    before = first.algorithm, late.algorithm
    for step in range(2):
        first.all_reduce(buffer(layout, rank, step), layout)
        first.finish()
    late.all_reduce(buffer(layout, rank, 7) * math.nan, layout)
    late.load_state_dict(copy.deepcopy(first.state_dict()))
    late.prepare("all_reduce", NUMEL)
    ops = {op: cost["calls"] for op, cost in late.traffic.details["by_op"].items()}
    found = [reducer.all_reduce(buffer(layout, rank, 2), layout) for reducer in (first, late)]
    after = {op: cost["calls"] - ops.get(op, 0) for op, cost in late.traffic.details["by_op"].items()}
    return before, (first.algorithm, late.algorithm), found, after, (first.finish(), late.finish())


def test_a_prepared_reducer_runs_the_algorithm_of_the_state_that_it_loads(turns):
    for before, after, (expected, found), calls, finite in turns(3).run(loaded_late):
        assert before == ("exchange", "gather")
        assert after == ("exchange", "exchange")
        assert torch.equal(found, expected)
        assert calls == {"all_gather": 0, "all_to_all": 2}
        assert finite == (True, True), "the NaN was of the run that was left"


def other_options(rank, world, group):
    """The answer of a reducer to the states of reducers with one other option, and its state afterwards."""
    layout, options = Layout.dim0(SHAPES, world), {"error_feedback": True, "algorithm": "exchange"}
    reducer = Reducer(build("int8"), group, **options)
    kept = copy.deepcopy(reducer.state_dict())
    answers = {}
    for option, value in OTHERS.items():
        compressor = build("int8", **value) if option == "compressor" else build("int8")
        other = Reducer(compressor, group, **{**options, **({} if option == "compressor" else {option: value})})
        other.all_reduce(buffer(layout, rank), layout)
        other.finish()
        with pytest.raises(BadInput) as refused:
            reducer.load_state_dict(other.state_dict())
        answers[option] = str(refused.value)
    for option, other in {
        "schedule": Reducer(build("int8"), group, schedule={"num_bits": {5: 4}}, **options),
        "nonfinite": Reducer(build("int8"), group, nonfinite="skip", **options),
    }.items():
        try:
            reducer.load_state_dict(other.state_dict())
        except BadInput as error:
            answers[option] = str(error)
    return answers, kept == reducer.state_dict()


OTHERS = {
    "compressor": {"num_bits": 4},
    "algorithm": "gather",
    "error_feedback": False,
    "residual_dtype": "bf16",
    "second": "float32",
    "granularity": "row",
    "exempt": Exempt(max_ndim=1),
    "dense_steps": 1,
    "seed": 1,
}


def test_the_state_of_a_reducer_with_another_option_is_refused(turns):
    for answers, unchanged in turns(2).run(other_options):
        assert unchanged
        assert "compressor {0: Int8(num_bits=8" in answers.pop("schedule")
        assert "nonfinite" not in answers
        for option, message in answers.items():
            assert f"saved by a reducer with {option} " in message, message
        assert answers.keys() == OTHERS.keys()


def of_more_ranks(rank, world, group):
    """A used reducer takes the state of another world; bytes of its next step, and what it then has kept."""
    shapes = [("matrix", (40, 50))]
    layout = Layout.dim0(shapes, world)
    reducer = Reducer(build("gradiveq", window=2, slice=8, components=2), group, error_feedback=True)
    flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        reducer.all_reduce(flat, layout)
        reducer.finish()
    with pytest.warns(UserWarning, match="of 5 ranks"):
        reducer.load_state_dict(state.stored(rank, 40, 5, {}))
    forgotten = {key: reducer.codec.state_dict()[key] for key in ("residuals", "generators", "states")}
    rows = []
    for _ in range(4):
        before, expected = reducer.traffic["sent"], reducer.closed_form(layout, "all_reduce")
        reducer.all_reduce(flat, layout)
        reducer.finish()
        rows.append((reducer.traffic["sent"] - before, expected))
    return reducer.step, forgotten, rows


def test_a_used_reducer_forgets_what_it_kept_under_another_number_of_ranks(turns):
    results = turns(2).run(of_more_ranks)
    assert all(step == 44 and not any(forgotten.values()) for step, forgotten, _ in results)
    sent = [sum(one) for one in zip(*[[sent for sent, _ in rows] for _, _, rows in results], strict=True)]
    assert all(sent == expected for *_, rows in results for sent, expected in rows)
    assert sent[0] == raw_bytes("all_reduce", 2000, 2) > sent[2], "it begins with the window of its first steps"


def wrong_buffer(rank, world, group):
    Reducer(build("none"), group).reduce_scatter(torch.zeros(3), Layout.dim0(SHAPES, world))


def test_a_buffer_of_another_size_is_an_error(turns):
    with pytest.raises(RunFault, match="matrix"):
        turns(2).run(wrong_buffer)


@pytest.mark.parametrize(
    ("given", "built"),
    [
        ("int8", ("int8", {})),
        ("topk+int8", ("topk+int8", {})),
        ({"method": "int8", "block": 24}, ("int8", {"block": 24})),
    ],
)
def test_a_name_or_a_mapping_builds_the_compressor(given, built):
    name, options = built
    assert check_options(given)[0].at(0) == build(name, **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("int9", "unknown compressor 'int9'.*Did you mean 'int"),
        ({"method": "int8", "blok": 4}, "unknown int8 option 'blok'.*Did you mean 'block'"),
        ({"block": 4}, "pass a name, such as 'int8'"),
        (8, "the compressor is 8: pass a name"),
    ],
)
def test_another_type_or_option_is_refused(given, message):
    with pytest.raises(BadInput, match=message):
        check_options(given)


def test_the_signature_shows_every_option():
    keywords = inspect.signature(Reducer).parameters
    assert {name: keywords[name].default for name in ReducerOptions.model_fields} == dict(ReducerOptions())
    assert set(keywords) - set(ReducerOptions.model_fields) == {"compressor", "group", "seed", "draws"}
    assert get_args(ReducerOptions.model_fields["algorithm"].annotation) == ("auto", *ALGORITHMS)


@pytest.mark.parametrize(
    ("given", "changes", "built"),
    [
        ("topk", {"density": {"0": 0.25, 20: 0.05}}, {0: ("topk", 0.25), 19: ("topk", 0.25), 20: ("topk", 0.05)}),
        ({"method": "topk", "density": 0.5}, {"density": {3: 0.1}}, {2: ("topk", 0.5), 3: ("topk", 0.1)}),
        (build("topk", density=0.5), {"density": {3: 0.1}}, {2: ("topk", 0.5), 900: ("topk", 0.1)}),
        (
            build("topk+int8", density=0.5, num_bits=4),
            {"density": {1: 0.2}, "int8.num_bits": {2: 8}},
            {n: ("topk+int8", *values) for n, values in enumerate([(0.5, 4), (0.2, 4), (0.2, 8)])},
        ),
    ],
)
def test_a_schedule_is_a_mapping_as_in_a_cell(given, changes, built):
    schedule, _ = check_options(given, schedule=changes)
    for step, (name, *values) in built.items():
        options = dict(zip(("density", "num_bits"), values, strict=False))
        assert schedule.at(step) == build(name, **options), step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "exchang"}, "'algorithm'.*Did you mean 'exchange'"),
        ({"second": "float16"}, "'second'.*Did you mean 'float32'"),
        ({"nonfinite": "stop"}, "'nonfinite'.*propagate, raise, skip"),
        ({"dense_steps": -1}, "dense_steps is -1"),
        ({"granularity": "bucket"}, "'granularity'.*piece, row"),
        ({"residual_dtype": "fp16"}, "'residual_dtype'.*Did you mean 'bf16'"),
        ({"algorithm": "native"}, "native needs a compressor that collectives can sum, and topk"),
        ({"error_feedbak": True}, "unknown option of Reducer 'error_feedbak'.*Did you mean 'error_feedback'"),
        ({"schedule": {"densty": {0: 0.1}}}, "unknown topk option in the schedule, 'densty'.*Did you mean 'density'"),
        ({"schedule": {"density": {-1: 0.1}}}, "schedule of 'density'"),
        ({"schedule": {"density": {0: 7.0}}}, "topk option 'density' is 7.0"),
        ({"schedule": {"density": 0.1}}, "the reducer's option schedule.density is 0.1"),
        ({"schedule": {"density": {0: 0.1, "0": 0.2}}}, "a step is given twice"),
    ],
)
def test_options_are_checked_without_a_process_group(options, message):
    with pytest.raises(BadInput, match=message):
        check_options("topk", **options)
    with pytest.raises(BadInput, match="granularity row"):
        check_options("bf16", granularity="row", algorithm="native")


def carried(rank, world, group):
    """A step whose flag carries two numbers of the caller's, with a value on the last rank that is not finite."""
    layout = Layout.dim0(SHAPES, world)
    reducer = Reducer(build("int8"), group, nonfinite="skip")
    flat = buffer(layout, rank)
    if rank == world - 1:
        flat[0] = math.nan
    reducer.all_reduce(flat, layout)
    total = torch.tensor([rank + 1.5, math.inf if rank == 0 else 1.0])
    first = reducer.finish(total), total.tolist()
    reducer.all_reduce(buffer(layout, rank), layout)
    total = torch.tensor([2.0**20 + rank, -1.0])
    return first, (reducer.finish(total), total.tolist())


@worlds
def test_what_travels_with_the_flag_is_summed_and_does_not_touch_it(turns, size):
    sums = sum(rank + 1.5 for rank in range(size)), math.inf
    second = size * 2.0**20 + sum(range(size)), -1.0 * size
    for first, then in turns(size).run(carried):
        assert first == (False, [*sums])
        assert then == (True, [*second])


def metered(rank, world, group):
    """Every operation once; what it gives and what the meter says."""
    METER.totals.clear()
    total = ops.all_reduce(torch.tensor([rank + 1.0, 2.0, 3.0]))
    top = ops.all_reduce(torch.tensor([rank]), "max", purpose="agreement")
    gathered = ops.all_gather(torch.tensor([rank, rank + 10]))
    sent = ops.broadcast(torch.full((5,), float(rank)), source=1)
    parts = torch.full((sum(range(world)) + world,), rank, dtype=torch.uint8)  # d + 1 bytes for rank d
    received = ops.begin_all_to_all(parts, [d + 1 for d in range(world)], [rank + 1] * world).wait()
    costs = {key: (cost.bytes, cost.calls, cost.seconds > 0) for key, cost in METER.totals.items()}
    return total, top, gathered, sent, received, costs


@worlds
def test_every_operation_is_right_and_counted(world, size):
    results = world(size).run(metered)
    for rank, (total, top, gathered, sent, received, costs) in enumerate(results):
        assert total.tolist() == [sum(range(1, size + 1)), 2.0 * size, 3.0 * size]
        assert top.tolist() == [size - 1]
        assert gathered.tolist() == [[r, r + 10] for r in range(size)]
        assert sent.tolist() == [1.0] * 5
        assert received.tolist() == [r for r in range(size) for _ in range(rank + 1)]
        assert costs["all_gather", "control"] == ((size - 1) * 16, 1, True)
        assert costs["broadcast", "control"] == ((size - 1) * 20 if rank == 1 else 0, 1, True)
        assert costs["all_to_all", "control"] == (sum(d + 1 for d in range(size) if d != rank), 1, True)
    for key, numbers in ((("all_reduce", "control"), 3), (("all_reduce", "agreement"), 2)):
        assert sum(result[-1][key][0] for result in results) == raw_bytes("all_reduce", numbers, size)


def in_parts(rank, world, group):
    """Every rank sends ``7 * to + 3 * rank`` bytes and more to rank ``to``, and some to all: in messages."""
    sizes = [[ops.LARGEST // 8 + 7 * to + 3 * of for to in range(world)] for of in range(world)]
    x = torch.randint(0, 256, (sum(sizes[rank]),), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))
    mine = [row[rank] for row in sizes]
    begun = [ops.begin_all_to_all(x, sizes[rank], mine, parts=parts) for parts in (1, 3)]
    ops.LARGEST, largest = 1000, ops.LARGEST
    try:
        begun.append(ops.begin_all_gather(x[:4321].view(-1, 29)))
    finally:
        ops.LARGEST = largest
    begun.append(ops.begin_all_gather(x[:4321].view(-1, 29)))
    return [len(pending.works) for pending in begun], [pending.wait() for pending in begun]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_large_messages_arrive_alike_in_one_part_and_in_several(world, size):
    for parts, (whole, split, in_five, gathered) in world(size).run(in_parts):
        assert parts == [1, 3, 5, 1]
        assert torch.equal(whole, split)
        assert torch.equal(in_five, gathered) and gathered.shape == (size, 149, 29)


def nothing_to_exchange(rank, world, group):
    empty = Sizes.of([[]] * world)
    return run(exchange(torch.empty(0, dtype=torch.uint8), empty.encodings, empty, empty, METER), group)[1]


def test_an_exchange_of_nothing(turns):
    assert turns(2).run(nothing_to_exchange) == [[[], []], [[], []]]
