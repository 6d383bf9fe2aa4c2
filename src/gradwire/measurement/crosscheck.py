"""The meter against the trace: both saw the profiled steps, each with its own clock.

The meter's times of a step stand in ``steps.parquet``; the trace has the same spans as ranges. Their sums over the same
profiled steps of a rank must agree, or one of the two counts what the other does not. A range opens before the meter's
clock starts and closes after it stops, so where the machine took a rank's core away in between, the trace has more. The
meter times that as well (``around_ms``), and a trace may be longer by so much. A framework's own reductions have no
meter, and nothing to compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.errors import BadInput
from gradwire.measurement.steps import read

TOLERANCE = 0.1  # of the trace's time
QUANTITIES = {"communication": "comm_ms", "encode": "encode_ms", "decode": "decode_ms"}  # columns of steps.parquet
AROUND = "around_ms"  # that opening and closing the ranges took
Times = Mapping[str, float]  # milliseconds by quantity


def against_meter(steps: Path, traced: Mapping[int, list[Times]]) -> dict[str, Any]:
    """Compare every rank's sums over its profiled steps.

    Args:
        steps: A run's ``steps.parquet``; it need not exist.
        traced: Each rank's recorded steps, in order: what the trace says that the reducer took.

    Returns:
        ``meter_over_trace``: for each quantity, and of all ranks, the quotient that is furthest from 1; without what
        did not occur. ``meter_agrees``: whether every trace is at least the meter's time and at most this and
        ``around_ms``, give or take `TOLERANCE`. Both None where nothing was metered.

    Raises:
        BadInput: If ``steps`` is unusable, or does not have as many profiled steps of a rank as the trace.
    """
    metered = profiled_steps(steps) if steps.exists() else {}
    quotients: dict[str, list[float]] = {}
    agrees = True
    for rank, recorded in traced.items() if metered else ():
        own = metered.get(rank, [])[-len(recorded) :]  # the profiler's own warm-up step comes first
        if len(own) < len(recorded):
            raise BadInput(f"{steps} has {len(own)} profiled steps of rank {rank}, its trace {len(recorded)}.")
        around = sum(row[AROUND] or 0.0 for row in own)
        for quantity, column in QUANTITIES.items():
            there = sum(times[quantity] for times in recorded)
            here = [row[column] for row in own]
            if None not in here and (there or any(here)):
                quotients.setdefault(quantity, []).append(sum(here) / there if there else float("inf"))
                agrees &= sum(here) - TOLERANCE * there <= there <= sum(here) + around + TOLERANCE * there
    if not quotients:
        return {"meter_agrees": None, "meter_over_trace": None}
    worst = {quantity: max(found, key=lambda quotient: abs(quotient - 1)) for quantity, found in quotients.items()}
    return {
        "meter_agrees": agrees,
        "meter_over_trace": {quantity: min(quotient, 1e9) for quantity, quotient in worst.items()},
    }


def profiled_steps(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Each rank's profiled rows, in the order of their steps."""
    table = read(path, ["step", "rank", "profiled", *QUANTITIES.values(), AROUND])
    found: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: row["step"]):
        if row["profiled"]:
            found.setdefault(row["rank"], []).append(row)
    return found
