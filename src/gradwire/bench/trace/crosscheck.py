"""Compare the meter's times of profiled steps with the trace's.

``steps.parquet`` holds the meter's times; the trace holds the same spans as ranges. Their sums over a rank's profiled
steps must agree, otherwise one of them counts something the other does not. A range opens before the meter's clock
starts and closes after it stops, so the trace is longer if the rank loses its core in between. The meter measures this
time (``around_ms``), and the trace may be longer by that much. A framework's own reductions are not metered, so there
is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.bench.trace.steps import read

TOLERANCE = 0.1  # of the trace's time
QUANTITIES = {  # columns of steps.parquet, and times of a breakdown
    "communication": ("comm_ms", "payload_ms_per_step"),
    "encode": ("encode_ms", "encode_ms_per_step"),
    "decode": ("decode_ms", "decode_ms_per_step"),
}
AROUND = "around_ms"  # time to open and close the ranges
Times = Mapping[str, Any]  # a breakdown of a step: milliseconds


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


def profiled_steps(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Profiled rows by rank, in step order."""
    columns = ["step", "rank", "profiled", *(column for column, _ in QUANTITIES.values()), AROUND]
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(read(path, columns).to_pylist(), key=lambda row: row["step"]):
        if row["profiled"]:
            rows.setdefault(row["rank"], []).append(row)
    return rows
