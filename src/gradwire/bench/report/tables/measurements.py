"""Rows of ``results.jsonl`` as measurements for the cost model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import Result
from gradwire.bench.statistics.collective_costs import Flow, Measurement
from gradwire.comm.communication import steps_per_message
from gradwire.comm.topology import between_islands, link_rate


def usable(rows: Iterable[Result], path: Path) -> list[Result]:
    """Select the rows for the fit: profiled, of the largest world size, with separable flows.

    Local updates need no profile, but another row with the same collective.

    Raises:
        BadInput: If the rows have fewer than two rates, or a strategy has no baseline.
    """
    chosen = [
        row
        for row in rows
        if row.status == "ok" and row.world_size > 1 and row.typical_step_ms and row.measured_steps and row.steps
        if (row.comm_time_ms_by_op and row.exposed_comm_ms is not None) or interval_of(row) != 1
        if unmeasurable(row) is None
    ]
    known = {(row.strategy, row.gradient_op) for row in chosen if interval_of(row) == 1}
    chosen = [row for row in chosen if (row.strategy, row.gradient_op) in known]
    world = max((row.world_size for row in chosen), default=0)
    chosen = of_common_seeds([row for row in chosen if row.world_size == world])
    rates = links_of(chosen)
    if len(rates) < 2:
        measured = f"only {', '.join(rates)}" if rates else "none"
        raise BadInput(f"{path}: a fit needs profiled cells on links of at least two rates, and has {measured}.")
    lacking = {row.strategy for row in chosen} - {row.strategy for row in chosen if row.compressor == BASELINE}
    if lacking:
        raise BadInput(f"{path}: no cell `{BASELINE}` of {', '.join(sorted(lacking))} to compare with.")
    return chosen


def links_of(rows: Iterable[Result]) -> set[str]:
    """The links with a rate that runs with a result had."""
    return {row.link for row in rows if row.status == "ok" and math.isfinite(link_rate(row.link))}


def description_in(rows: Iterable[Result], path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The flags that describe the model of an experiment, by its baseline on the fastest link, and its cells.

    Raises:
        BadInput: If no run of the baseline has a result.
    """
    ok = [row for row in rows if row.status == "ok"]
    timed = [row for row in ok if row.compressor == BASELINE and row.typical_step_ms and row.parameters]
    if not timed:
        raise BadInput(f"{path}: no finished run of `{BASELINE}` has a step and a number of parameters.")
    base = min(timed, key=lambda row: (-link_rate(row.link), row.world_size))
    alike = (base.strategy, base.link, base.world_size)
    steps = [row.typical_step_ms or 0.0 for row in timed if (row.strategy, row.link, row.world_size) == alike]
    described = {"parameters": base.parameters, "step_ms": fmean(steps), "strategy": base.strategy}
    return described, {row.compressor: row.compress_config or {} for row in ok if row.strategy == base.strategy}


def of_common_seeds(rows: Sequence[Result]) -> list[Result]:
    """Keep the runs of the seeds that all labels of a strategy have on a link, so that steps compare seed by seed.

    A label without a seed of the baseline there is left out.
    """
    seeds: defaultdict[tuple[str, str], defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        seeds[row.strategy, row.link][row.compressor].add(row.seed)
    common = {}
    for place, of_label in seeds.items():
        base = of_label.get(BASELINE, set.union(*of_label.values()))
        common[place] = base.intersection(*(of for of in of_label.values() if of & base))
    return [row for row in rows if row.seed in common[row.strategy, row.link]]


def unpredictable(row: Result, islands: int = 1) -> str | None:
    """Why a row tells nothing about steps on so many islands; None if it does."""
    if row.strategy == "hsdp" and islands == 1:
        return "hsdp has islands: add --islands N"
    return unmeasurable(row)


def unmeasurable(row: Result) -> str | None:
    """Why the flows of a row cannot be separated; None if they can."""
    if row.islands == 1:
        return None
    if interval_of(row) != 1:
        return "local updates between islands are not predicted"
    if row.strategy != "hsdp":
        return "which of its messages leave an island is not counted"
    if row.islands == row.world_size:
        return "islands of one rank send nothing inside"
    if "inside" in (row.compress_config or {}):
        return "bytes of a collective inside islands and between them are not counted apart with a compressor inside"
    return None


def interval_of(row: Result) -> float:
    """Steps per message."""
    return steps_per_message(row.compress_config or {})


def measurement_of(row: Result) -> Measurement:
    """Convert a row for the cost model.

    FSDP's parameters are separated from gradients by their collective; if both use the same one, they count together.
    All other collectives of a step (its loss, its flag) count with the gradients.
    """
    steps, measured = row.steps or 1, row.measured_steps or 1
    times = {op: ms / measured / 1e3 for op, ms in (row.comm_time_ms_by_op or {}).items()}
    measurement = Measurement(
        strategy=row.strategy,
        label=row.compressor,
        sharded=row.sharded,
        fixed="algorithm" in (row.compress_config or {}),
        world=row.world_size,
        link=row.link,
        rate=link_rate(row.link),
        step=(row.typical_step_ms or 0.0) / 1e3,
        exposed=(row.exposed_comm_ms or 0.0) / 1e3,
        decode=(row.decompress_time_ms or 0.0) / 1e3,
        gradients=Flow(row.gradient_op, 0.0, 0.0),
        seed=row.seed,
    )
    if row.islands > 1:
        return _with_islands(measurement, row, times)
    ratio = row.compression_ratio_steady or row.compression_ratio
    gradients = (row.bytes_raw_total or 0) / ratio / steps / row.world_size if ratio else 0.0
    gathered = (row.bytes_parameters_total or 0) / steps / row.world_size
    op = row.parameter_op
    if gathered and op in times and op != row.gradient_op:
        measurement = replace(measurement, parameters=Flow(op, gathered, times.pop(op)))
    else:
        gradients += gathered
    interval = interval_of(row)
    if interval != 1:
        flow = Flow(row.gradient_op, gradients, 0.0)
        return replace(measurement, interval=interval, exposed=0.0, decode=0.0, gradients=flow)
    return replace(measurement, gradients=Flow(row.gradient_op, gradients, sum(times.values())))


def _with_islands(measurement: Measurement, row: Result, times: dict[str, float]) -> Measurement:
    """Add the flows of hsdp: shards are reduced between islands, the rest is inside.

    A trace has the time of a collective, not that of its groups, so flows of one collective share it by their bytes.

    Args:
        measurement: The measurement without flows.
        row: Its row.
        times: Seconds of a step in each collective.
    """
    ranks, sending = row.world_size // row.islands, row.world_size * (row.steps or 1)
    ratio = row.compression_ratio_between_steady or row.compression_ratio_between
    parameters = row.bytes_parameters_total or 0
    sent = {
        "gradients": (row.bytes_between_raw_total or 0) / ratio if ratio else 0.0,
        "parameters": parameters,
        "scattered": (row.bytes_inside_total or 0) - parameters,
    }
    reduction = row.gradient_op if row.hooked else "all_reduce"
    ops = {"gradients": reduction, "parameters": row.parameter_op, "scattered": "reduce_scatter"}
    of_op = {op: sum(sent[name] for name in ops if ops[name] == op) for op in ops.values()}
    times[reduction] = sum(seconds for op, seconds in times.items() if op == reduction or op not in of_op)
    flows: dict[str, Any] = {
        name: Flow(op, sent[name] / sending, times[op] * sent[name] / of_op[op], inside=name != "gradients")
        for name, op in ops.items()
        if op in times and sent[name]
    }
    between, rate = between_islands(row.link), link_rate(row.link)
    rates: dict[str, Any] = {"rate": rate / (ranks if between else 1), "inside_rate": math.inf if between else rate}
    return replace(measurement, sharded=True, islands=row.islands, **rates, **flows)
