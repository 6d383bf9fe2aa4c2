"""Stream one rank's torch.profiler trace and sort its events into the kinds that the analysis needs.

Contents of such traces (torch 2.13, from real traces):

- Steps are ``ProfilerStep#N`` annotations on the main thread; each contains a range ``gradwire/step`` of the
  package, which excludes what follows a step (evaluations, checkpoints).
- The package's other ranges are ``gradwire/<purpose>/<name>``.
- gloo runs each collective on a worker thread, as an annotation ``gloo:<op>``; the call that issued it is a CPU op
  ``c10d::<op>`` on the calling thread. gloo runs a reduce-scatter as an all-reduce named ``gloo:all_reduce``: only the
  call distinguishes the two. A collective whose end the profiler missed extends to the end of the trace
  (``finished: false``).
- A call's ``Input Dims`` are the shapes of its tensors (``record_shapes``); tensor lists have no recorded type.
- NCCL runs as kernels ``ncclDevKernel_*`` (before NCCL 2.19 ``ncclKernel_*``), whose ``Collective name`` gives the
  op if the kernel's own name does not (``SendRecv``); ``nccl:<op>`` annotations and calls are launches only.
- A CPU op of a library (``aten::addmm``) computes. ``autograd::…`` and ``…Backward0`` wrap hooks, including
  waits for collectives, and compute nothing themselves.

An interval set is an int64 array of shape [n, 2]: half-open intervals [start, end) in nanoseconds. Its operations
accept intervals in any order, overlapping or empty, and return them sorted, disjoint, non-empty and with adjacent ones
merged.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ijson.backends.yajl2_c as ijson  # C backend only: the others are too slow for a trace
import numpy as np
from ijson.common import JSONError
from numpy.typing import NDArray

from gradwire.base.errors import BadInput

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
OWN = "gradwire/"
STEP = "gradwire/step"
MANY = 2**18  # edges of one thread's or stream's intervals
WRAPPERS = ("autograd", "torch", "c10d", "_c10d_functional")  # libraries whose ops only wait or wrap other ops
Intervals = NDArray[np.int64]


class Span(NamedTuple):
    """A named event: name or op, thread or stream, start and end in nanoseconds, and purpose.

    ``numel``: elements passed to a collective's call; None if shapes were not recorded.
    """

    name: str
    lane: Any
    start: int
    end: int
    purpose: str = ""
    numel: int | None = None


class Cover:
    """The union of a growing number of intervals, compacted from time to time."""

    def __init__(self) -> None:
        self._edges = array("q")  # start, end, start, …
        self._limit = MANY

    def add(self, start: int, end: int) -> None:
        """Add an interval, in nanoseconds."""
        self._edges.extend((start, end))
        if len(self._edges) >= self._limit:
            self._edges = array("q", self.intervals().tobytes())
            self._limit = max(MANY, 2 * len(self._edges))

    def intervals(self) -> Intervals:
        """The union."""
        return union(np.frombuffer(self._edges, np.int64).reshape(-1, 2))


@dataclass
class Trace:
    """Events of one rank's trace.

    Args:
        world_size: World size in the trace's header; None without a process group.
        steps: ``ProfilerStep#N`` annotations.
        windows: ``gradwire/step`` ranges on the CPU.
        ranges: The package's other ranges on the CPU.
        device_ranges: The same ranges on the device.
        calls: Calls that issue a collective, by op.
        gloo: Collectives that gloo ran, by gloo's name for the op.
        nccl: NCCL's kernels, by op.
        ops: Intervals of CPU ops that compute, by thread.
        kernels: Intervals of device kernels, by stream.
        unfinished: Number of events whose end the profiler missed.
    """

    world_size: int | None = None
    steps: list[Span] = field(default_factory=list)
    windows: list[Span] = field(default_factory=list)
    ranges: list[Span] = field(default_factory=list)
    device_ranges: list[Span] = field(default_factory=list)
    calls: list[Span] = field(default_factory=list)
    gloo: list[Span] = field(default_factory=list)
    nccl: list[Span] = field(default_factory=list)
    ops: dict[Any, Cover] = field(default_factory=lambda: defaultdict(Cover))
    kernels: dict[Any, Cover] = field(default_factory=lambda: defaultdict(Cover))
    unfinished: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """Sort one complete event (``ph: X``) into its kind and ignore other events."""
        category, name, lane = event.get("cat"), event["name"], event["tid"]
        arguments = event.get("args", {})
        start, end = round(1000 * event["ts"]), round(1000 * (event["ts"] + event["dur"]))
        if category == "cpu_op":
            library, _, op = name.partition("::")
            if library == "c10d":
                self.calls.append(Span(op_of(op), lane, start, end, numel=numel(arguments.get("Input Dims", []))))
            elif op and library not in WRAPPERS:
                self.ops[lane].add(start, end)
        elif category == "kernel":
            if name.startswith("nccl"):
                self.nccl.append(Span(op_of(arguments.get("Collective name", ""), name), lane, start, end))
            else:
                self.kernels[lane].add(start, end)
        elif category == "user_annotation":
            self.unfinished += arguments.get("finished") is False
            if name.startswith("ProfilerStep#"):
                self.steps.append(Span(name, lane, start, end))
            elif name.startswith("gloo:"):
                self.gloo.append(Span(op_of(name), lane, start, end))
            elif name == STEP:
                self.windows.append(Span(name, lane, start, end))
            elif name.startswith(OWN):
                self.ranges.append(own_range(name, lane, start, end))
        elif category == "gpu_user_annotation" and name.startswith(OWN) and name != STEP:
            self.device_ranges.append(own_range(name, lane, start, end))


def numel(shapes: list[Any]) -> int | None:
    """Number of elements in a call's largest tensor or list of tensors; None without tensors.

    Args:
        shapes: For each argument, a tensor's shape, a list of tensors' shapes, or ``[]``.
    """
    tensors = [shape if isinstance(shape[0], list) else [shape] for shape in shapes if shape]
    return max((sum(map(math.prod, shapes)) for shapes in tensors), default=None)


def own_range(name: str, lane: Any, start: int, end: int) -> Span:
    """Parse one of the package's ranges."""
    purpose, _, what = name.removeprefix(OWN).rpartition("/")
    return Span(what, lane, start, end, purpose)


def op_of(*names: str) -> str:
    """The collective named by the first recognized name, in torch's, gloo's or NCCL's spelling, or ``other``."""
    for name in names:
        letters = re.sub("[^a-z]", "", name.lower())
        for op in OPS:
            if op.replace("_", "") in letters:
                return op
    return "other"


def read(path: Path) -> Trace:
    """Stream a ``.pt.trace.json.gz``; memory grows only by 16 bytes per outermost op.

    Raises:
        BadInput: If the file is truncated, is not a trace, or has no profiled step.
    """
    trace = Trace()
    try:
        trace.world_size = _world_size(path)
        for event in _events(path):
            if event["ph"] == "X":
                trace.add(event)
    except (OSError, EOFError, zlib.error, JSONError, LookupError, TypeError) as error:
        raise BadInput(
            f"{path} is truncated or not a profiler trace ({type(error).__name__}: {error}); train this run again."
        ) from None
    if not trace.steps:
        raise BadInput(f"{path} holds no profiled step (ProfilerStep#N); train this run again with --profile.")
    return trace


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path) as stream:
        yield from ijson.items(stream, "traceEvents.item", use_float=True)


def _world_size(path: Path) -> int | None:
    """The world size in the trace's header, which precedes the events."""
    with gzip.open(path) as stream:
        for prefix, _, value in ijson.parse(stream):
            if prefix == "distributedInfo.world_size":
                return int(value)
            if prefix == "traceEvents":
                return None
    raise LookupError("no traceEvents")


def intervals(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """The union of ``(start, end)`` pairs."""
    return union(np.array([*pairs], dtype=np.int64).reshape(-1, 2))


def union(*sets: Intervals) -> Intervals:
    """The time covered by at least one of ``sets``."""
    return _covered([(1, times) for times in sets], level=1)


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """The time covered by both sets."""
    return _covered([(1, union(first)), (1, union(second))], level=2)


def difference(first: Intervals, second: Intervals) -> Intervals:
    """The time covered by ``first`` but not by ``second``."""
    return _covered([(1, union(first)), (-1, union(second))], level=1)


def near(times: Intervals, start: int, end: int) -> Intervals:
    """The intervals of a sorted, disjoint set that overlap [start, end), as a view."""
    return times[np.searchsorted(times[:, 1], start, "right") : np.searchsorted(times[:, 0], end, "left")]


def length(times: Intervals) -> int:
    """The total length of a set in nanoseconds."""
    merged = union(times)
    return int((merged[:, 1] - merged[:, 0]).sum())


def _covered(weighted: list[tuple[int, Intervals]], level: int) -> Intervals:
    """Where the weights of the covering intervals sum to ``level`` or more, by one sweep over all edges."""
    edges = np.concatenate([np.empty(0, np.int64), *(times.ravel() for _, times in weighted)])
    changes = np.concatenate(
        [np.empty(0, np.int64), *(np.tile([weight, -weight], len(times)) for weight, times in weighted)]
    )
    order = np.argsort(edges, kind="stable")
    edges, sums = edges[order], np.cumsum(changes[order])
    inside = (sums[:-1] >= level) & (edges[:-1] < edges[1:])
    starts, ends = edges[:-1][inside], edges[1:][inside]
    gap = starts[1:] != ends[:-1]
    first, last = np.append(True, gap), np.append(gap, True)
    return np.stack([starts[first[: len(starts)]], ends[last[: len(ends)]]], axis=1)
