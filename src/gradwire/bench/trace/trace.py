"""The command ``trace``: break down the time of profiled steps, from all ranks' traces into ``profile.json``.

Definitions, per rank and step. A step is the part of its ``ProfilerStep#N`` annotation inside the range
``gradwire/step`` (the whole annotation without such a range). A time is the length of the union of its intervals within
the step. Training ends a step by reading a number from the device, so a step includes its device work.

- **communication**, by op: on gloo, from the call that issues a collective until gloo completes it; on NCCL, its
  kernels. The package's own ranges ``gradwire/<purpose>/<op>`` (the call, and the wait) also count, except with NCCL,
  where they time the launch. A collective inside such a range counts under the range's op. Communication includes
  waiting for slower ranks and the small all-reduces of the loss. At world size 1 it is zero. Ops may run concurrently,
  so their times may add up to more than the communication time.
- **encode, decode** of gradients: the ranges ``gradwire/codec/…``, timed on the device if there is one; the ranges
  ``gradwire/parameters/…`` together are the **parameter codec**.
- **payload**: the ranges ``gradwire/payload/<op>``, timed likewise; the meter calls this communication.
- **compute**: kernels other than NCCL's if the rank has a device, else CPU ops of the thread that trains, excluding
  those inside the package's ranges, calls and collectives on the same thread or stream. Codec work is therefore not
  compute and hides nothing, nor do the other threads of a rank, such as those that read data.
- **transfer**: communication without waiting for ranks that call late (`transfer_ms`).
- **overlap** = compute ∩ communication; **exposed** = communication − compute; **idle**: none of these (Python, the
  autograd engine, data loading).

`against_meter` compares payload, encode and decode with the meter's times of the same steps, in ``steps.parquet``.
Their sums must agree, otherwise one of them counts something the other does not. A range opens before the meter's
clock starts and closes after it stops, so the trace is longer if the rank loses its core in between: by at most
``around_ms``, which the meter measures. A framework's own reductions are not metered, so there is nothing to compare.
A collective whose end is missing from the trace ends with its step; such events are counted in ``unfinished``.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.base.failures import diverged
from gradwire.base.files import write_json
from gradwire.base.flags import output_file
from gradwire.base.strict import Strict
from gradwire.bench.steps import read as read_steps
from gradwire.bench.steps import weights
from gradwire.bench.trace.events import (
    OPS,
    Intervals,
    Span,
    Trace,
    difference,
    intersection,
    intervals,
    length,
    near,
    read,
    union,
)
from gradwire.comm.closed_forms import raw_bytes

SCHEMA_VERSION = 1
CODEC = ("encode", "decode")
REDUCTIONS = ("all_reduce", "reduce_scatter")
BY_OP = "comm_time_ms_by_op_per_step"
Times = dict[str, Any]  # a breakdown of a step, or of the mean step: milliseconds
RUNS_AS = {"reduce_scatter": "all_reduce"}  # gloo's substitute for an op
PATTERN = "rank[0-9]*.pt.trace.json.gz"
TOLERANCE = 0.1  # of the trace's time
QUANTITIES = {  # columns of steps.parquet, and times of a breakdown
    "communication": ("comm_ms", "payload_ms_per_step"),
    "encode": ("encode_ms", "encode_ms_per_step"),
    "decode": ("decode_ms", "decode_ms_per_step"),
}
AROUND = "around_ms"  # time to open and close the ranges


@dataclass(frozen=True)
class Activity:
    """Intervals in which one rank communicated, computed, encoded and decoded."""

    communication: dict[str, Intervals]
    compute: Intervals
    encode: Intervals
    decode: Intervals
    parameter_codec: Intervals
    payload: Intervals

    def near(self, step: Span) -> Activity:
        """The intervals that may overlap a step."""

        def cut(intervals: Intervals) -> Intervals:
            return near(intervals, step.start, step.end)

        return Activity(
            {op: cut(time) for op, time in self.communication.items()},
            *map(cut, (self.compute, self.encode, self.decode, self.parameter_codec, self.payload)),
        )


class Options(Strict):
    """Flags of ``gradwire trace``."""

    run_dir: Path = Field(description="a run's folder, with profiler/")
    output: Annotated[Path, output_file] | None = Field(
        None, description="file to write (default: RUN_DIR/profile.json)"
    )


def output_dir(options: Options) -> Path | None:
    """The run's folder, or None if it does not exist."""
    return options.run_dir if options.run_dir.is_dir() else None


def main(options: Options) -> None:
    """Read all ranks' traces and write the profile."""
    output = options.output or options.run_dir / "profile.json"
    if diverged(options.run_dir):  # a result, not a fault; its steps are incomplete
        write_json(output, {"schema_version": SCHEMA_VERSION, "steps": 0, "ranks": {}})
        print(f"{output}: the run diverged; its steps are not analyzed")
        return
    result = profile(options.run_dir)
    write_json(output, result)
    print(
        f"{output}: {result['step_ms']:.1f} ms per step, communication {result['comm_time_ms_per_step']:.1f} ms "
        f"({result['comm_ratio']:.0%}), of it exposed {result['exposed_comm_ms']:.1f} ms"
    )


def profile(run_dir: Path) -> dict[str, Any]:
    """Return the mean breakdown over ranks and, under ``ranks``, each rank's mean and steps.

    Raises:
        BadInput: If a trace is missing or unusable.
    """
    traces = {rank: read(path) for rank, path in trace_files(run_dir).items()}
    expected = max(trace.world_size or 1 for trace in traces.values())
    missing = sorted(set(range(expected)) - set(traces))
    if missing:
        raise BadInput(
            f"{run_dir / 'profiler'}: the trace of rank {', '.join(map(str, missing))} of {expected} is missing; "
            "train this run again."
        )
    steps = {rank: breakdowns(trace) for rank, trace in traces.items()}
    metered = run_dir / "steps.parquet"
    agreement = against_meter(metered, {rank: [*of_rank.values()] for rank, of_rank in steps.items()})
    share = shares(metered, len(steps[0]))
    means = {rank: mean(of_rank.values(), share) for rank, of_rank in steps.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        "world_size": expected,
        "steps": len(steps[0]),
        **with_ratios(mean(means.values())),
        "transfer_ms_per_step": transfer_ms([*traces.values()], share),
        "reduced_bytes_per_step": reduced_bytes([*traces.values()]),
        "unfinished": sum(trace.unfinished for trace in traces.values()),
        **agreement,
        "ranks": {
            str(rank): with_ratios(means[rank])
            | {"per_step": {name: with_ratios(times) for name, times in of_rank.items()}}
            for rank, of_rank in steps.items()
        },
    }


def trace_files(run_dir: Path) -> dict[int, Path]:
    """Trace files by rank, in rank order.

    Raises:
        BadInput: If there are none.
    """
    paths = {int(re.findall(r"\d+", path.name)[0]): path for path in (run_dir / "profiler").glob(PATTERN)}
    if not paths:
        raise BadInput(
            f"{run_dir / 'profiler'} holds no trace (rank<R>.pt.trace.json.gz); train this run with --profile."
        )
    return dict(sorted(paths.items()))


def breakdowns(trace: Trace) -> dict[str, Times]:
    """Breakdowns of the profiled steps by step name, in order."""
    when = activity(trace)
    steps = sorted(trace.steps, key=lambda step: step.start)
    inside = covered(trace.windows or steps)
    return {step.name: breakdown(when.near(step), intersection(inside, covered([step]))) for step in steps}


def breakdown(when: Activity, step: Intervals) -> Times:
    """Break down the time of one step on one rank, in milliseconds."""

    def ms(time: Intervals) -> float:
        return length(intersection(time, step)) / 1e6

    communication = union(*when.communication.values())
    busy = union(communication, when.compute, when.encode, when.decode, when.parameter_codec)
    return {
        "step_ms": ms(step),
        "comm_time_ms_per_step": ms(communication),
        BY_OP: {op: ms(time) for op, time in when.communication.items()},
        "compute_ms_per_step": ms(when.compute),
        "encode_ms_per_step": ms(when.encode),
        "decode_ms_per_step": ms(when.decode),
        "parameter_codec_ms_per_step": ms(when.parameter_codec),
        "payload_ms_per_step": ms(when.payload),
        "overlap_ms_per_step": ms(intersection(when.compute, communication)),
        "exposed_comm_ms": ms(difference(communication, when.compute)),
        "idle_ms_per_step": ms(difference(step, busy)),
    }


def shares(path: Path, number: int) -> list[float]:
    """The weights of the profiled steps in their mean: one in H may be that of a round; equal without a file.

    Args:
        path: A run's ``steps.parquet``, which may be missing.
        number: How many steps were recorded.
    """
    if not path.exists():
        return [1 / number] * number
    rows = [row for row in sorted_rows(path, ["step", "rank", "profiled", "kind"]) if row["rank"] == 0]
    recorded = [row["kind"] for row in rows if row["profiled"]][-number:]
    return weights(recorded, [row["kind"] for row in rows])


def mean(breakdowns: Iterable[Times], share: Sequence[float] | None = None) -> Times:
    """The mean of breakdowns, weighted by their shares; a missing op counts as zero."""
    rows = list(breakdowns)
    ops = sorted({op for row in rows for op in row[BY_OP]})
    by_op = {op: fmean([row[BY_OP].get(op, 0.0) for row in rows], share) for op in ops}
    return {key: by_op if key == BY_OP else fmean([row[key] for row in rows], share) for key in rows[0]}


def with_ratios(times: Times) -> Times:
    """Add the ratios to a breakdown; ``overlap_ratio`` is None without communication."""
    communication = times["comm_time_ms_per_step"]
    overlap = times["overlap_ms_per_step"] / communication if communication else None
    return times | {"comm_ratio": communication / times["step_ms"], "overlap_ratio": overlap}


def activity(trace: Trace) -> Activity:
    """Compute a rank's activity from its trace."""
    if trace.kernels or trace.nccl:
        lanes, ranges, foreign = trace.kernels, trace.device_ranges, trace.device_ranges
    else:
        trains = {step.lane for step in trace.steps}  # other threads send, or read data
        lanes = {lane: cover for lane, cover in trace.ops.items() if lane in trains}
        ranges, foreign = trace.ranges, [*trace.ranges, *trace.calls, *trace.gloo]
    gradients = [span for span in ranges if span.purpose != "parameters"]
    compute = [
        difference(cover.intervals(), covered(span for span in foreign if span.lane == lane))
        for lane, cover in lanes.items()
    ]
    return Activity(
        communication=communication(trace),
        compute=union(*compute),
        encode=covered(span for span in gradients if span.name == "encode"),
        decode=covered(span for span in gradients if span.name == "decode"),
        parameter_codec=covered(span for span in ranges if span.name in CODEC and span.purpose == "parameters"),
        payload=covered(span for span in ranges if span.name in OPS and span.purpose == "payload"),
    )


def communication(trace: Trace) -> dict[str, Intervals]:
    """Intervals of each op's collectives."""
    spans = collectives(trace, trace.gloo)
    return {op: covered(span for span in spans if span.name == op) for op in sorted({span.name for span in spans})}


def collectives(trace: Trace, gloo: list[Span]) -> list[Span]:
    """All collectives, including those in ``gloo`` and the package's own ranges around collectives."""
    if trace.world_size in (None, 1):
        return []
    if trace.nccl:
        return [*trace.nccl, *gloo]
    ranges = [span for span in trace.ranges if span.name in OPS]
    return [*ranges, *gloo_collectives(trace.calls, gloo, ranges)]


def transfer_ms(traces: Sequence[Trace], share: Sequence[float] | None = None) -> float | None:
    """Milliseconds of communication per step without waiting for late ranks, averaged over ranks and steps.

    A collective moves data once the last rank has called it, and that rank does not wait. Its time, the shortest of all
    ranks', is therefore the transfer time; each rank's earlier time in the collective is waiting. Clocks of different
    ranks are not compared.

    Returns:
        The time, or None if the ranks' collectives do not match one to one.
    """
    times = []
    for ranks in zip_longest(*map(collectives_of_steps, traces), fillvalue=None):
        if any(rank is None or rank.keys() != ranks[0].keys() for rank in ranks):
            return None
        shortest = {which: min(rank[which].end - rank[which].start for rank in ranks) for which in ranks[0]}
        ends = [[(span.end - shortest[which], span.end) for which, span in rank.items()] for rank in ranks]
        times.append(fmean(length(intervals(of_rank)) / 1e6 for of_rank in ends))
    return fmean(times, share)


def reduced_bytes(traces: Sequence[Trace]) -> float | None:
    """Gradient bytes per step over all ranks, from the shapes passed to reductions.

    They are counted as bandwidth-optimal float32 collectives, like the closed form of a framework's own reduction;
    encodings are not float32 and are metered instead. Calls for other purposes are inside the package's ranges.

    Returns:
        The bytes, or None if the trace has no shapes or no reduction.
    """
    world = len(traces)
    sent = []
    for trace in traces:
        ranges = [span for span in trace.ranges if span.name in OPS]
        for call in trace.calls:
            if call.name in REDUCTIONS and within_steps(trace, call) and purpose_of(call, ranges) == "payload":
                if call.numel is None:
                    return None
                sent.append(raw_bytes(call.name, call.numel, world))
    return sum(sent) / world / len(traces[0].steps) if sent else None


def within_steps(trace: Trace, span: Span) -> bool:
    """Whether a span starts within a step."""
    return any(step.start <= span.start < step.end for step in trace.windows or trace.steps)


def purpose_of(call: Span, ranges: list[Span]) -> str:
    """The purpose of the package's range around a call; without one, the call is the framework's, for gradients."""
    around = range_around(call, ranges)
    return "payload" if around is None else around.purpose


def collectives_of_steps(trace: Trace) -> list[dict[tuple[str, str, int], Span]]:
    """The collectives that start in each step, by op, purpose and index; point-to-point messages are excluded.

    Those of one purpose have the same order on all ranks; those of two may run in two threads.
    """
    spans = sorted(collectives(trace, [span for span in trace.gloo if span.name in OPS]), key=lambda span: span.start)
    by_step = []
    for step in sorted(trace.steps, key=lambda step: step.start):
        numbers: defaultdict[tuple[str, str], count[int]] = defaultdict(count)
        within = [window for window in trace.windows or [step] if step.start <= window.start < step.end]
        inside = [span for span in spans if any(window.start <= span.start < window.end for window in within)]
        kinds = [(span.name, span.purpose) for span in inside]
        by_step.append({(*kind, next(numbers[kind])): span for kind, span in zip(kinds, inside, strict=True)})
    return by_step


def gloo_collectives(calls: list[Span], events: list[Span], ranges: list[Span]) -> list[Span]:
    """Spans from each collective's call to the end of gloo's event, named by the requested op.

    gloo starts collectives in the order of their calls, so the k-th event of an op belongs to its k-th call. An event
    without a call (issued before the trace began) keeps its own start and op.
    """
    waiting: dict[str, deque[Span]] = defaultdict(deque)
    for call in sorted(calls, key=lambda call: call.start):
        waiting[RUNS_AS.get(call.name, call.name)].append(call)
    spans = []
    for event in sorted(events, key=lambda event: event.start):
        queue = waiting[RUNS_AS.get(event.name, event.name)]
        known = event.name in OPS and queue and queue[0].start <= event.start
        call = queue.popleft() if known else event
        asked = range_around(call, ranges) or call
        spans.append(Span(asked.name, call.lane, call.start, max(call.end, event.end), asked.purpose))
    return spans


def range_around(call: Span, ranges: list[Span]) -> Span | None:
    """The package's range around a call."""
    return next((span for span in ranges if span.lane == call.lane and span.start <= call.start < span.end), None)


def covered(spans: Iterable[Span]) -> Intervals:
    """The union of the spans' times."""
    return intervals((span.start, span.end) for span in spans)


def against_meter(steps: Path, traced: Mapping[int, list[Times]]) -> dict[str, Any]:
    """Compare every rank's sums over its profiled steps.

    Args:
        steps: A run's ``steps.parquet``, which may be missing.
        traced: The breakdowns of each rank's recorded steps in order.

    Returns:
        ``meter_over_trace``: for each quantity that occurred, the ranks' quotient furthest from 1. ``meter_agrees``:
        whether every trace time is between the meter's time and that plus ``around_ms``, within `TOLERANCE`. Both are
        None if nothing was metered.

    Raises:
        BadInput: If ``steps`` is unusable, or has fewer profiled steps of a rank than the trace.
    """
    metered = profiled_steps(steps) if steps.exists() else {}
    quotients: dict[str, list[float]] = {}
    agrees = True
    for rank, recorded in traced.items() if metered else ():
        rows = metered.get(rank, [])[-len(recorded) :]  # the profiler's own warm-up step comes first
        if len(rows) < len(recorded):
            raise BadInput(f"{steps} has {len(rows)} profiled steps of rank {rank}, its trace {len(recorded)}.")
        around = sum(row[AROUND] or 0.0 for row in rows)
        for quantity, (column, time) in QUANTITIES.items():
            in_trace = sum(times[time] for times in recorded)
            values = [row[column] for row in rows]
            if None in values or not (in_trace or any(values)):
                continue
            in_meter = sum(values)
            quotients.setdefault(quantity, []).append(in_meter / in_trace if in_trace else float("inf"))
            slack = TOLERANCE * in_trace
            agrees &= in_meter - slack <= in_trace <= in_meter + around + slack
    if not quotients:
        return {"meter_agrees": None, "meter_over_trace": None}
    worst = {quantity: max(of_ranks, key=lambda of: abs(of - 1)) for quantity, of_ranks in quotients.items()}
    return {
        "meter_agrees": agrees,
        "meter_over_trace": {quantity: min(quotient, 1e9) for quantity, quotient in worst.items()},
    }


def sorted_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows in step order."""
    return sorted(read_steps(path, columns).to_pylist(), key=lambda row: row["step"])


def profiled_steps(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Profiled rows by rank, in step order."""
    columns = ["step", "rank", "profiled", *(column for column, _ in QUANTITIES.values()), AROUND]
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in sorted_rows(path, columns):
        if row["profiled"]:
            rows.setdefault(row["rank"], []).append(row)
    return rows
