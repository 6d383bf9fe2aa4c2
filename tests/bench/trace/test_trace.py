"""trace: interval arithmetic against brute force, traces with answers computed by hand, and a real gloo trace.

Of `trace/events.py`.
"""

from __future__ import annotations

import gzip
import itertools
import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_tb_profiler.profiler.data import RunProfileData
from traces import event, profile_of, steps, write_trace

from gradwire.base.errors import BadInput
from gradwire.bench.report.page import curves
from gradwire.bench.report.tables.across_runs import read_curve
from gradwire.bench.trace.events import (
    Cover,
    Span,
    Trace,
    difference,
    intersection,
    intervals,
    length,
    near,
    op_of,
    read,
    union,
)
from gradwire.bench.trace.trace import transfer_ms
from gradwire.cli import main

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple), max_size=8)


def points(those):
    """Brute force: the unit cells that half-open intervals cover."""
    return {cell for start, end in those for cell in range(start, end)}


@settings(deadline=None)
@given(pairs, pairs)
def test_interval_sets_are_sets_of_points(first, second):
    a, b = (np.array(one, dtype=np.int64).reshape(-1, 2) for one in (first, second))
    for made, oracle in (
        (union(a, b), points(first) | points(second)),
        (intersection(a, b), points(first) & points(second)),
        (difference(a, b), points(first) - points(second)),
    ):
        assert points(made.tolist()) == oracle
        assert length(made) == len(oracle)
        assert (made[:, 0] < made[:, 1]).all()
        assert (made[1:, 0] > made[:-1, 1]).all(), "sorted, disjoint, touching ones joined"


@given(pairs)
@settings(deadline=None)
def test_a_cover_forgets_what_others_cover(those):
    cover = Cover()
    cover._limit = 4
    for start, end in those:
        cover.add(start, end)
    assert cover.intervals().tolist() == intervals(those).tolist()


@given(pairs, st.integers(0, 40), st.integers(0, 40))
@settings(deadline=None)
def test_what_is_near_holds_all_that_is_within(those, start, end):
    one, window = intervals(those), intervals([(start, end)])
    assert intersection(near(one, start, end), window).tolist() == intersection(one, window).tolist()


def test_nanoseconds_of_a_machine_up_for_weeks_stay_exact():
    start = 4_336_211_839_493_249
    one = intervals([(start, start + 3), (start + 2, start + 7)])
    assert length(one) == 7


@pytest.mark.parametrize(
    ("names", "op"),
    [
        (("gloo:all_gather",), "all_gather"),
        (("_allgather_base_",), "all_gather"),
        (("allreduce_",), "all_reduce"),
        (("alltoall_base_",), "all_to_all"),
        (("", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"), "reduce_scatter"),
        (("all_to_allv", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"), "all_to_all"),
        (("", "ncclKernel_Broadcast_RING_LL_Sum_int8_t"), "broadcast"),
        (("gloo:barrier",), "other"),
    ],
)
def test_every_spelling_of_an_op_is_known(names, op):
    assert op_of(*names) == op


def test_a_cuda_trace_gives_the_times_computed_by_hand(tmp_path):
    launches = [  # on the CPU: no time of the device's
        event("cpu_op", "aten::mm", 20, 900, 1),
        event("cpu_op", "c10d::_reduce_scatter_base_", 42, 68, 1),
        event("user_annotation", "nccl:_reduce_scatter_base", 50, 60, 1),
        event("user_annotation", "gradwire/reduce_scatter", 40, 70, 1),
        event("user_annotation", "gradwire/encode", 70, 95, 1),
        event("cuda_runtime", "cudaDeviceSynchronize", 800, 1000, 1),
        event("gpu_user_annotation", "ProfilerStep#3", 100, 990, 7),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 0, 90, 7, stream=7),
    ]
    kernels = [
        event("kernel", "sm90_xmma_gemm_f32f32", 100, 400, 7, stream=7),
        event("kernel", "encode_kernel", 450, 600, 7, stream=7),  # in the range below: no compute
        event("gpu_user_annotation", "gradwire/encode", 440, 610, 7),
        event("kernel", "elementwise_kernel", 460, 480, 22, stream=22),  # at the same time, on another stream: compute
        event("kernel", "decode_kernel", 810, 840, 7, stream=7),
        event("gpu_user_annotation", "gradwire/decode", 800, 850, 7),
        event("kernel", "elementwise_kernel", 990, 1010, 7, stream=7),  # in both steps
        event("kernel", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgs)", 300, 700, 20, stream=20),
        event(
            "kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgs)", 650, 750, 21, **{"Collective name": "all_to_allv"}
        ),
        event("kernel", "ncclKernel_AllGather_RING_LL_Sum_int8_t", 1900, 2100, 20, stream=20),  # past the last step
    ]
    write_trace(tmp_path, 0, [*steps(0, 1000, 2000), *launches, *kernels])
    all_reduce = event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 0, 500, 20, stream=20)
    write_trace(tmp_path, 1, [*steps(0, 1000, 2000), all_reduce])

    profile = profile_of(tmp_path)
    first, second = profile["ranks"]["0"]["per_step"].values()
    assert first == pytest.approx(
        {
            "step_ms": 1.0,
            "comm_time_ms_per_step": 0.45,
            "comm_time_ms_by_op_per_step": pytest.approx({"reduce_scatter": 0.4, "all_to_all": 0.1, "all_gather": 0.0}),
            "compute_ms_per_step": 0.33,
            "encode_ms_per_step": 0.17,
            "decode_ms_per_step": 0.05,
            "parameter_codec_ms_per_step": 0.0,
            "payload_ms_per_step": 0.0,
            "overlap_ms_per_step": 0.12,
            "exposed_comm_ms": 0.33,
            "idle_ms_per_step": 0.29,
            "comm_ratio": 0.45,
            "overlap_ratio": 0.12 / 0.45,
        }
    )
    assert (second["comm_time_ms_per_step"], second["compute_ms_per_step"]) == (0.1, 0.01)
    assert (second["overlap_ratio"], second["idle_ms_per_step"]) == (0.0, 0.89)
    assert profile["steps"] == 2
    assert profile["step_ms"] == 1.0
    assert profile["comm_time_ms_by_op_per_step"] == pytest.approx(
        {"all_gather": 0.025, "all_reduce": 0.125, "all_to_all": 0.025, "reduce_scatter": 0.1}
    )
    assert profile["comm_time_ms_per_step"] == pytest.approx((0.275 + 0.25) / 2)
    assert profile["overlap_ratio"] == pytest.approx((0.12 / 2 / 2) / ((0.275 + 0.25) / 2))


def test_a_gloo_trace_gives_the_times_computed_by_hand(tmp_path):
    wait = "autograd::engine::evaluate_function: RegisterPostBackwardFunctionBackward"
    events = [
        event("cpu_op", wait, 100, 800, 1),  # a wrapper that waits for the reduce-scatter: computes nothing
        event("cpu_op", "RegisterPostBackwardFunctionBackward", 100, 790, 1),
        event("cpu_op", "aten::mm", 110, 200, 1),
        event("cpu_op", "aten::fill_", 150, 160, 1),
        event("cpu_op", "c10d::_reduce_scatter_base_", 210, 260, 1),
        event("cpu_op", "aten::clone", 220, 250, 1),  # the collective's own copy
        event("user_annotation", "gloo:all_reduce", 270, 600, 2),  # how gloo runs the reduce-scatter
        event("cpu_op", "aten::div_", 550, 590, 2),
        event("cpu_op", "aten::add", 300, 350, 1),  # overlaps with it
        event("user_annotation", "gradwire/encode", 820, 860, 1),
        event("cpu_op", "aten::to", 830, 850, 1),
        event("user_annotation", "gradwire/all_to_all", 870, 930, 1),
        event("cpu_op", "c10d::alltoall_base_", 875, 880, 1),
        event("user_annotation", "gloo:all_to_all", 885, 920, 3),
        event("user_annotation", "gradwire/all_gather", 935, 960, 1),  # made of an all-reduce: counted once, as this
        event("cpu_op", "c10d::allreduce_", 936, 938, 1),
        event("user_annotation", "gloo:all_reduce", 940, 955, 2),
        event("cpu_op", "c10d::allreduce_", 975, 978, 1),
        event("user_annotation", "gloo:all_reduce", 980, 1480, 3, finished=False),  # ends with the step
    ]
    for rank in (0, 1):
        write_trace(tmp_path, rank, [*steps(0, 1000), *events])
    profile = profile_of(tmp_path)
    assert profile["comm_time_ms_by_op_per_step"] == pytest.approx(
        {"reduce_scatter": 0.39, "all_to_all": 0.06, "all_gather": 0.025, "all_reduce": 0.025}
    )
    expected = {
        "comm_time_ms_per_step": 0.5,
        "compute_ms_per_step": 0.14,
        "encode_ms_per_step": 0.04,
        "decode_ms_per_step": 0.0,
        "overlap_ms_per_step": 0.05,
        "exposed_comm_ms": 0.45,
        "idle_ms_per_step": 0.37,
    }
    assert {name: profile[name] for name in expected} == pytest.approx(expected)
    assert profile["unfinished"] == 2


def test_ranges_are_distinguished_by_purpose_and_what_follows_a_step_is_left_out(tmp_path):
    events = [
        event("user_annotation", "gradwire/step", 10, 90, 1),  # then an evaluation, up to the next step
        event("user_annotation", "gradwire/parameters/encode", 11, 14, 1),
        event("cpu_op", "aten::to", 12, 13, 1),  # within: no compute
        event("user_annotation", "gradwire/parameters/all_to_all", 14, 19, 1),
        event("user_annotation", "gradwire/parameters/decode", 19, 21, 1),
        event("cpu_op", "aten::mm", 21, 41, 1),
        event("user_annotation", "gradwire/codec/encode", 41, 48, 1),
        event("user_annotation", "gradwire/payload/all_to_all", 48, 59, 1),
        event("user_annotation", "gradwire/codec/decode", 59, 62, 1),
        event("user_annotation", "gradwire/control/all_reduce", 62, 79, 1),
        event("cpu_op", "aten::mm", 92, 99, 1),
        event("user_annotation", "gradwire/control/all_reduce", 99, 100, 1),
    ]
    for rank in (0, 1):
        write_trace(tmp_path, rank, [*steps(0, 100), *events])
    profile = profile_of(tmp_path)
    expected = {
        "step_ms": 0.080,
        "comm_time_ms_per_step": 0.033,
        "compute_ms_per_step": 0.020,
        "encode_ms_per_step": 0.007,
        "decode_ms_per_step": 0.003,
        "parameter_codec_ms_per_step": 0.005,
        "payload_ms_per_step": 0.011,
        "idle_ms_per_step": 0.012,
    }
    assert {name: profile[name] for name in expected} == pytest.approx(expected)


def write_steps(run_dir, metered, around=0.0):
    """A ``steps.parquet``: for each rank, the meter's times of the steps, of which the first was not recorded."""
    rows = [
        {"step": i, "rank": rank, "profiled": i < 3, "comm_ms": comm, "encode_ms": encode, "decode_ms": decode}
        | {"around_ms": around, "warmup": i == 0, "kind": "end" if i % 5 == 2 else "local"}
        for rank, times in metered.items()
        for i, (comm, encode, decode) in enumerate(times)
    ]
    pq.write_table(pa.Table.from_pylist(rows[::-1]), run_dir / "steps.parquet")


RECORDED = [  # two steps of 1 ms: payload 0.11 and 0.13 ms, encoding 0.07 and 0.09 ms
    *steps(0, 1000, 2000),
    event("user_annotation", "gradwire/codec/encode", 100, 170, 1),
    event("user_annotation", "gradwire/payload/all_to_all", 200, 310, 1),
    event("user_annotation", "gradwire/control/all_reduce", 400, 900, 1),
    event("user_annotation", "gradwire/codec/encode", 1100, 1190, 1),
    event("user_annotation", "gradwire/payload/all_to_all", 1200, 1330, 1),
]
RIGHT = [(9.0, 9.0, 9.0), (0.111, 0.071, 0.0), (0.131, 0.088, 0.0), (8.0, 8.0, 8.0)]


@pytest.mark.parametrize(
    ("second", "around", "agrees", "quotients"),
    [
        (RIGHT, 0.0, True, {"communication": 0.242 / 0.24, "encode": 0.159 / 0.16}),
        ([RIGHT[0], (0.121, 0.071, 0.0), (0.147, 0.088, 0.0)], 0.0, False, {"communication": 0.268 / 0.24}),
        ([RIGHT[0], (0.111, 0.0, 0.0), (0.131, 0.07, 0.0)], 0.0, False, {"encode": 0.07 / 0.16}),
        ([RIGHT[0], (0.111, 0.071, 0.001), (0.131, 0.088, 0.0)], 0.0, False, {"decode": 1e9}),
        # The range was open for longer than the meter's clock ran, and the meter knows for how long: twice 20 µs.
        ([RIGHT[0], (0.111, 0.071, 0.0), (0.082, 0.088, 0.0)], 0.02, True, {"communication": 0.193 / 0.24}),
        ([RIGHT[0], (0.111, 0.071, 0.0), (0.082, 0.088, 0.0)], 0.01, False, {"communication": 0.193 / 0.24}),
        # That the meter has more than the trace, it explains not.
        ([RIGHT[0], (0.121, 0.071, 0.0), (0.147, 0.088, 0.0)], 0.02, False, {"communication": 0.268 / 0.24}),
    ],
)
def test_a_meter_that_disagrees_with_the_trace_of_any_rank_is_reported(tmp_path, second, around, agrees, quotients):
    for rank in (0, 1):
        write_trace(tmp_path, rank, RECORDED)
    write_steps(tmp_path, {0: RIGHT, 1: second}, around)
    profile = profile_of(tmp_path)
    assert profile["meter_agrees"] is agrees
    assert profile["meter_over_trace"] == pytest.approx(profile["meter_over_trace"] | quotients)


def test_a_round_in_which_one_step_of_five_communicates_has_its_share_in_the_mean_step(tmp_path):
    for rank in (0, 1):
        write_trace(tmp_path, rank, RECORDED)
    two_rounds = [*RIGHT[:3], *[(9.0, 9.0, 9.0)] * 7]
    write_steps(tmp_path, {0: two_rounds, 1: two_rounds})
    profile = profile_of(tmp_path)
    assert profile["encode_ms_per_step"] == pytest.approx(0.8 * 0.07 + 0.2 * 0.09)
    assert profile["comm_time_ms_per_step"] == pytest.approx(0.8 * 0.61 + 0.2 * 0.13)
    assert profile["transfer_ms_per_step"] == profile["comm_time_ms_per_step"], "no rank was late"
    assert profile["comm_ratio"] == pytest.approx(profile["comm_time_ms_per_step"])
    assert profile["comm_time_ms_by_op_per_step"] == pytest.approx(
        {"all_reduce": 0.8 * 0.5, "all_to_all": 0.8 * 0.11 + 0.2 * 0.13}
    )


def test_where_nothing_was_metered_there_is_nothing_to_agree_with(tmp_path, capsys):
    write_trace(tmp_path, 0, RECORDED, world_size=1)
    assert profile_of(tmp_path)["meter_agrees"] is None, "there is no steps.parquet"
    write_steps(tmp_path, {0: [(None, None, None)] * 3})
    assert profile_of(tmp_path)["meter_agrees"] is None, "the framework reduced"
    write_steps(tmp_path, {0: RIGHT[:1]})
    assert main(["trace", "--run_dir", str(tmp_path)]) == 2
    assert "1 profiled steps of rank 0, its trace 2" in capsys.readouterr().err


def spoilt(**columns):
    """Change columns of a file: an array replaces one, None takes it away."""

    def spoil(path):
        table = pq.read_table(path)
        for name, values in columns.items():
            table = table.drop_columns(name)
            table = table if values is None else table.append_column(name, pa.array(values))
        pq.write_table(table, path)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"PAR1" + b"\xff" * 40 + b"PAR1"),
        spoilt(step=None),
        spoilt(step=["zero", "one", "two"]),
        spoilt(step=[0, 1, None]),
        spoilt(step=[0, 1, 10**12]),
        spoilt(step=[0, 1, -1]),
        spoilt(step=[[0], [1], [2]]),
    ],
)
def test_a_damaged_steps_parquet_is_one_clear_message_wherever_it_is_read(tmp_path, capsys, spoil):
    numbers = (0.5, 7.25, 1.75)
    floats = ("step_ms", "comm_ms", "encode_ms", "decode_ms", "around_ms", *curves.COLUMNS)
    good = {"step": range(3), "rank": [0] * 3, **dict.fromkeys(floats, numbers)}
    good |= {"profiled": [True] * 3, "warmup": [False] * 3, "kind": ["alike"] * 3}
    path = tmp_path / "steps.parquet"
    pq.write_table(pa.table(good), path)
    assert curves.read(path).seconds[-1] == read_curve(path).total_s == pytest.approx(0.0095)
    spoil(path)
    for reader in (curves.read, read_curve):
        with pytest.raises(BadInput, match=f"{path} is unusable .*train this run again"):
            reader(path)
    write_trace(tmp_path, 0, RECORDED, world_size=1)
    assert main(["trace", "--run_dir", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"{path} is unusable" in message and "Traceback" not in message and len(message.splitlines()) == 1


def test_a_group_of_one_communicates_with_nobody(tmp_path):
    events = [event("cpu_op", "c10d::allreduce_", 5, 10, 1), event("user_annotation", "gloo:all_reduce", 10, 60, 2)]
    write_trace(tmp_path, 0, [*steps(0, 100), *events], world_size=1)
    profile = profile_of(tmp_path)
    assert (profile["comm_ratio"], profile["overlap_ratio"], profile["comm_time_ms_by_op_per_step"]) == (0.0, None, {})


def traced(rank, world_size, group, folder):
    """Two profiled steps: an all-reduce during a product, then a reduce-scatter, an encoding and an exchange."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    from gradwire.comm.collectives import ops
    from gradwire.comm.collectives.meter import Meter

    meter = Meter()
    gradient, weight = torch.full((1_000_001,), rank + 1.0), torch.ones(500, 500)
    path = folder / "profiler" / f"rank{rank}.pt.trace.json.gz"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2),
        on_trace_ready=lambda recorder: recorder.export_chrome_trace(str(path)),
    ) as recorder:
        for step in range(3):
            work = dist.all_reduce(gradient, async_op=True)
            weight = torch.mm(weight, weight) / 500
            work.wait()
            dist.reduce_scatter_tensor(torch.empty(300_003), torch.ones(300_003 * world_size))
            with record_function("gradwire/encode"):
                half = gradient.to(torch.float16).view(torch.uint8)
            sizes = [999_999, 1_000_003]
            ops.begin_all_to_all(half, sizes, [sizes[rank]] * world_size, meter=meter if step else Meter()).wait()
            float(weight[0, 0])
            recorder.step()
    return 1000 * meter.by_op("control")["all_to_all"].seconds, 1000 * meter.around


def brute_force(path):
    """Each step's communication, compute and overlap in ms, segment by segment, from the raw events.

    The collectives of ``traced`` never overlap, so the k-th call belongs to the k-th gloo event.
    """
    with gzip.open(path) as file:
        raw = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    raw = [(e["cat"], e["name"], e["tid"], round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"]))) for e in raw]
    calls = sorted((start, end) for _, name, _, start, end in raw if name.startswith("c10d::"))
    gloo = sorted((start, end) for _, name, _, start, end in raw if name.startswith("gloo:"))
    own = [(start, end) for _, name, _, start, end in raw if name == "gradwire/control/all_to_all"]
    communication = [*own, *((call[0], max(call[1], ran[1])) for call, ran in zip(calls, gloo, strict=True))]
    windows = sorted((start, end, tid) for _, name, tid, start, end in raw if name.startswith("ProfilerStep#"))
    main_thread = windows[0][2]
    ops = [(start, end) for _, name, tid, start, end in raw if name.startswith("aten::") and tid == main_thread]
    hidden = [(start, end) for _, name, _, start, end in raw if name.startswith("gradwire/")] + calls
    edges = sorted({edge for *_, start, end in raw for edge in (start, end)})

    def covers(those, point):
        return any(start <= point < end for start, end in those)

    for start, end, _ in windows:
        total = {"communication": 0, "compute": 0, "both": 0}
        for left, right in itertools.pairwise(edges):
            if start <= left < end:
                talks = covers(communication, left)
                computes = covers(ops, left) and not covers(hidden, left)
                total["communication"] += talks * (right - left)
                total["compute"] += computes * (right - left)
                total["both"] += (talks and computes) * (right - left)
        yield {name: time / 1e6 for name, time in total.items()}


def steps_in_tensorboard(path):
    """The steps that TensorBoard's plugin finds in a trace, with communication in each."""
    found = RunProfileData.parse("rank", None, str(path), str(path.parent))
    assert found.has_communication and {node.step_name for node in found.comm_node_list} == {*found.steps_names}
    return [f"ProfilerStep#{name}" for name in found.steps_names]


def test_a_real_gloo_trace_agrees_with_brute_force_and_with_the_meter_and_opens_in_tensorboard(tmp_path, world):
    (tmp_path / "profiler").mkdir()
    meters = world(2).run(traced, tmp_path)
    profile = profile_of(tmp_path)
    assert set(profile["comm_time_ms_by_op_per_step"]) == {"all_reduce", "reduce_scatter", "all_to_all"}
    for rank, rank_profile in profile["ranks"].items():
        trace = tmp_path / "profiler" / f"rank{rank}.pt.trace.json.gz"
        oracle = list(brute_force(trace))
        assert steps_in_tensorboard(trace) == [*rank_profile["per_step"]]
        for step, brute in zip(rank_profile["per_step"].values(), oracle, strict=True):
            assert step["comm_time_ms_per_step"] == pytest.approx(brute["communication"], abs=1e-6)
            assert step["compute_ms_per_step"] == pytest.approx(brute["compute"], abs=1e-6)
            assert step["overlap_ms_per_step"] == pytest.approx(brute["both"], abs=1e-6)
            assert 0 < step["overlap_ms_per_step"] < step["compute_ms_per_step"]
            assert step["encode_ms_per_step"] > 0
        exchanged = 2 * rank_profile["comm_time_ms_by_op_per_step"]["all_to_all"]
        metered, around = meters[int(rank)]  # a range is opened before its seconds are counted, and closed after them
        assert metered - 0.2 <= exchanged <= metered + around + 0.2  # two clocks, converted by the profiler


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: b"not gzip", "truncated or not a profiler trace"),
        (lambda data: gzip.compress(gzip.decompress(data)[:-400]), "truncated"),
        (lambda data: gzip.compress(b'{"traceEvents": [{"ph": "X", "name": "a"}]}'), "not a profiler trace"),
        (lambda data: gzip.compress(b"{}"), "no traceEvents"),
        (lambda data: gzip.compress(gzip.decompress(data).replace(b"ProfilerStep#", b"Step")), "no profiled step"),
    ],
)
def test_an_unusable_trace_is_one_clear_message(tmp_path, capsys, spoil, words):
    path = write_trace(tmp_path, 0, steps(0, 100), world_size=1)
    path.write_bytes(spoil(path.read_bytes()))
    assert main(["trace", "--run_dir", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert str(path) in message
    assert not (tmp_path / "profile.json").exists()
    assert json.loads((tmp_path / "trace.failed.json").read_text())["exit_code"] == 2


def test_missing_traces_are_named(tmp_path, capsys):
    assert main(["trace", "--run_dir", str(tmp_path / "nowhere")]) == 2
    assert "holds no trace" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
    write_trace(tmp_path, 2, steps(0, 100), world_size=4)
    write_trace(tmp_path, 0, steps(0, 100), world_size=4)
    assert main(["trace", "--run_dir", str(tmp_path)]) == 2
    assert "rank 1, 3 of 4 is missing" in capsys.readouterr().err


def test_a_run_that_diverged_is_no_fault_of_its_trace(tmp_path):
    (tmp_path / "record.json").write_text('{"status": "diverged"}')
    assert profile_of(tmp_path) == {"schema_version": 1, "steps": 0, "ranks": {}}


def test_a_trace_is_streamed(tmp_path):
    shape = "[" + ", ".join(["4096"] * 200) + "]"
    ops = [event("cpu_op", "aten::mm", i, i + 0.5, 1, Shape=shape) for i in range(10_000)]
    path = write_trace(tmp_path, 0, [*steps(0, 10_000), *ops])
    size = len(gzip.decompress(path.read_bytes()))
    tracemalloc.start()
    trace = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace.ops[1].intervals()) == 10_000
    assert peak < size / 20


def two_ranks(late: int, offset: int) -> list[Trace]:
    """Two steps of two ranks: a gather that rank 1 calls late, and while it waits a reduction that rank 0 does."""
    traces = []
    for rank, first in enumerate((100, 100 + late)):
        clock = rank * offset
        trace = Trace(world_size=2)
        for step in range(2):
            start = clock + 1000 * step
            trace.steps.append(Span(f"ProfilerStep#{step}", 0, start, start + 1000))
            trace.ranges.append(Span("all_gather", 0, start + first, start + 200, "payload"))
            trace.ranges.append(Span("all_reduce", 0, start + 300 + 5 * rank, start + 350 + 9 * rank, "control"))
        traces.append(trace)
    return traces


@pytest.mark.parametrize(("late", "offset"), [(30, 0), (30, 10**9), (0, 0)])
def test_transfer_is_communication_without_waiting_whatever_the_clocks(late, offset):
    traces = two_ranks(late, offset)
    assert transfer_ms(traces) == pytest.approx((100 - late + 50) / 1e6)
    # What is within another collective is not counted twice, and is waited for like that one.
    for trace, call in zip(traces, (150, 160), strict=True):
        start = trace.steps[0].start
        trace.calls.append(Span("all_gather", 0, start + call, start + call + 1))
        trace.gloo.append(Span("all_gather", 7, start + call + 1, start + 190))
    assert transfer_ms(traces) == pytest.approx((100 - late + 50) / 1e6)


def test_collectives_that_do_not_match_have_no_transfer():
    traces = two_ranks(30, 0)
    traces[0].ranges.pop()
    assert transfer_ms(traces) is None
    assert transfer_ms([Trace(world_size=1, steps=[Span("ProfilerStep#0", 0, 0, 10)])]) == 0
