"""Measurements of one step on this rank: times, bytes and elements.

Bytes and elements are differences of counters that grow over the run. Where an evaluation follows, the distance of the
reduced gradient from the exact mean is measured too, by a float64 reduce-scatter of the whole gradient, counted as
``control``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.base.errors import RunFault
from gradwire.base.units import UNSHAPED
from gradwire.bench.launch.links import INTERFACE, LINK
from gradwire.bench.training.environment import PeakMemory
from gradwire.comm.collectives import Reducer, ops
from gradwire.comm.collectives.meter import METER, Traffic
from gradwire.comm.collectives.reducer import Reduced

Row = dict[str, Any]  # one rank's row of steps.parquet

INTERFACES = Path("/proc/self/net/dev")  # of this process's network namespace
TRANSMITTED = 8  # index of the bytes sent among the columns after the interface's name
COUNTED = (  # counters of `Reducer.traffic.details`, recorded per step
    *(f"{which}_elements" for which in ("chosen", "sparse", "encoded", "fallback", "exempt")),
    *("elements", "fallbacks", "extra_collectives"),
)
COLUMNS = ("grad_rel_error", "grad_rel_error_linf", "grad_cos_sim")
BLOCK = 2**21  # elements of a row compared at once, which bounds the float64 copies


class Clock:
    """Times of one step in milliseconds. Phases are timed on CPU only: on CUDA they would need a synchronization.

    A step ends by reading a number from the device, so its wall time is correct on every device.
    """

    def __init__(self, device: torch.device) -> None:
        self._phases = device.type == "cpu"
        self._origin = time.perf_counter()
        self.times: Row = {}
        self.started_s = 0.0

    def start(self) -> None:
        """Start a step."""
        self._started = self._last = time.perf_counter()
        self.started_s = self._started - self._origin
        self.times = {}

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to ``phase``."""
        now = time.perf_counter()
        if self._phases:
            self.times[phase] = self.times.get(phase, 0.0) + 1000 * (now - self._last)
        self._last = now

    def stop(self) -> None:
        """End the step and record ``step_ms``."""
        self.times["step_ms"] = 1000 * (time.perf_counter() - self._started)


def link_name() -> str:
    """The name of the link, ``100mbit`` or ``between-100mbit``, or ``none``."""
    return os.environ.get(LINK, UNSHAPED)


def transmitted() -> int | None:
    """Bytes sent so far by the interface of this rank or its island, headers included; None without a link.

    Raises:
        RunFault: If the interface does not exist.
    """
    interface = os.environ.get(INTERFACE)
    if interface is None:
        return None
    for line in INTERFACES.read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[TRANSMITTED])
    raise RunFault(f"{INTERFACE} is {interface}, but {INTERFACES} has no such interface.")


def transmitted_since(before: int | None) -> int | None:
    """Bytes sent since `transmitted` returned ``before``; None without a link."""
    now = transmitted()
    return None if now is None or before is None else now - before


class Counters:
    """Takes the differences of the counters from step to step.

    Args:
        reducer: This rank's reducer, or None.
    """

    def __init__(self, reducer: Reducer | None) -> None:
        self._reducer = reducer
        self._traffic = self._read()
        self.start()

    def start(self) -> None:
        """Start a step."""
        self._parameters, self._momenta = METER.sent("parameters"), METER.sent("momenta")
        self._around = METER.around

    def stop(self, *, timed: bool) -> Row:
        """The step's columns; ``timed`` as for `traffic_between`.

        The reducer's are those since the last step's end, so that a message that ends between two steps is counted.
        """
        before, self._traffic = self._traffic, self._read()
        return traffic_between(before, self._traffic, timed=timed) | {
            "bytes_parameters": METER.sent("parameters") - self._parameters,
            "bytes_momenta": METER.sent("momenta") - self._momenta,
            "around_ms": 1000 * (METER.around - self._around),
        }

    def _read(self) -> dict[str, Any] | None:
        return None if self._reducer is None else flat(self._reducer.traffic)


def flat(traffic: Traffic) -> dict[str, Any]:
    """The numbers of `Reducer.traffic` and its details as one mapping."""
    return traffic | traffic.details


def traffic_between(before: dict[str, Any] | None, now: dict[str, Any] | None, *, timed: bool) -> Row:
    """Bytes, elements and times between two `Reducer.traffic` of this rank; none without a reducer.

    ``bytes_closed_form`` is None if a size depended on the data. Times are None unless ``timed``: on a GPU, measuring
    them needs a synchronization, which the meter does in profiled steps only.
    """
    if before is None or now is None:
        return {}

    def milliseconds(seconds: float) -> float | None:
        return 1000 * seconds if timed else None

    closed = now["closed_form"]
    return {
        "bytes_closed_form": None if closed is None else closed - before["closed_form"],
        "inside": bytes_inside(before, now),
        "bytes_agreement": now["agreement"] - before["agreement"],
        "bytes_raw": now["raw"] - before["raw"],
        "bytes_sent": now["sent"] - before["sent"],
        "bytes_by_op": {
            op: cost["bytes"] - before["by_op"].get(op, {"bytes": 0})["bytes"] for op, cost in now["by_op"].items()
        },
        **{f"bytes_{name}": now[name] - before[name] for name in ("index", "padding")},
        **{name: now[name] - before[name] for name in COUNTED},
        "extra_ms": milliseconds(now["extra_seconds"] - before["extra_seconds"]),
        "comm_ms": milliseconds(seconds_on_wire(now) - seconds_on_wire(before)),
        "encode_ms": milliseconds(now["encode_seconds"] - before["encode_seconds"]),
        "decode_ms": milliseconds(now["decode_seconds"] - before["decode_seconds"]),
    }


def bytes_inside(before: dict[str, Any], now: dict[str, Any]) -> Row | None:
    """Bytes of a reducer's part inside an island between two `IslandReducer.traffic`; None without such a part."""
    old, new = before.get("inside"), now.get("inside")
    if old is None or new is None:
        return None
    old, new = flat(old), flat(new)
    names = ("raw", "sent", "closed_form")
    return {name: None if new[name] is None else new[name] - old[name] for name in names}


def seconds_on_wire(traffic: dict[str, Any]) -> float:
    """Seconds spent in the collectives that carry gradients."""
    return sum(cost["seconds"] for cost in traffic["by_op"].values())


@contextmanager
def sampled(reducer: Reducer | None, memory: PeakMemory) -> Iterator[dict[str, float | None]]:
    """Compare the gradients reduced in this context; the columns are filled on exit, after the step is timed.

    Sampling does not affect training: gradients are kept by reference, the comparison copies them block by block, and
    no random numbers are drawn.

    Args:
        reducer: The reducer, or None in a step that is not sampled, which has no such columns.
        memory: Peak memory, which excludes the sample's own memory where possible.
    """
    columns: dict[str, float | None] = {}
    if reducer is None:
        yield columns
        return
    with memory.left_out(), reducer.keeping() as reductions:
        yield columns
        error = compression_error(reductions, reducer.group, reducer.everyone)
        reductions.clear()
    if error is not None:
        columns.update(zip(COLUMNS, error, strict=True))


class CompressionError(NamedTuple):
    """A delivered gradient d compared with the exact mean g of the ranks' gradients, without residuals.

    Attributes:
        rel_error: ||d - g|| / ||g||.
        rel_error_linf: max |d - g| / max |g|.
        cos_sim: <d, g> / (||d|| ||g||); None if d is 0.
    """

    rel_error: float
    rel_error_linf: float
    cos_sim: float | None


# Why: docs/decisions.md, "Sampled gradients".
def compression_error(
    reductions: Iterable[Reduced], group: ops.Group = None, everyone: ops.Group = None
) -> CompressionError | None:
    """Compare the results of reductions, taken together, with float64 means. Every rank must call it.

    Args:
        reductions: This rank's reductions.
        group: The ranks of each reduction.
        everyone: All ranks whose reductions are taken together: those of ``group``, or more.

    Returns:
        The comparison, equal on all ranks; None if nothing was reduced, the mean is 0, or a value is not finite.
    """
    sums = maxima = None
    for exact, delivered in (pair for reduction in reductions for pair in _blocks(reduction, group)):
        error = delivered - exact
        dots = torch.stack([error.dot(error), exact.dot(exact), delivered.dot(delivered), delivered.dot(exact)])
        peaks = torch.stack([error.abs().amax(), exact.abs().amax()]) if error.numel() else dots.new_zeros(2)
        sums = dots if sums is None else sums + dots
        maxima = peaks if maxima is None else torch.maximum(maxima, peaks)
    if sums is None or maxima is None:
        return None
    error, exact, delivered, both = ops.all_reduce(sums, "sum", everyone).tolist()
    furthest, largest = ops.all_reduce(maxima, "max", everyone).tolist()
    if not math.isfinite(error + exact + delivered) or not exact:
        return None
    return CompressionError(
        math.sqrt(error / exact), furthest / largest, both / math.sqrt(exact * delivered) if delivered else None
    )


def _blocks(reduction: Reduced, group: ops.Group) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the exact and the delivered mean of this rank's row in blocks: float64 vectors, without padding."""
    kind, flat, layout, mean = reduction
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = layout.in_rows(flat)
    delivered = mean if kind == "reduce_scatter" else layout.in_rows(mean)[rank]
    real = torch.zeros(layout.row_numel, dtype=torch.bool, device=flat.device)
    for shard in layout.rows[rank]:
        real[layout.place_in_row(shard)] = True
    for start in range(0, layout.row_numel, BLOCK):
        block = slice(start, start + BLOCK)
        exact = ops.begin_reduce_scatter(rows[:, block].to(torch.float64).contiguous(), group).wait().div_(world)
        yield exact[real[block]], delivered[block][real[block]].to(torch.float64)
