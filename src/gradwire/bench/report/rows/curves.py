"""Curves from ``steps.parquet``: losses, seconds, gradient error and residual norm over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.base.errors import BadInput
from gradwire.bench.report.rows.record import Result
from gradwire.bench.trace.steps import durations
from gradwire.bench.trace.steps import read as read_steps

COLUMNS = ("loss", "val_loss", "grad_rel_error", "residual_norm")
WINDOWS = 100
Array = NDArray[np.float64]


class Curves(NamedTuple):
    """One run, step by step: means over ranks, and the slowest rank's step times.

    Attributes:
        seconds: Since the first step began, after each step; evaluations are left out.
        values: Each of `COLUMNS` by step, NaN where it was not measured.
    """

    seconds: Array
    values: dict[str, Array]


def read(path: Path) -> Curves:
    """Read the curves of a run from its ``steps.parquet``.

    Raises:
        BadInput: If the file is unusable.
    """
    table = read_steps(path, ["step", "step_ms", *COLUMNS])
    step, ms, *columns = (table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names)
    each = durations(step, ms)
    values = {name: _over_ranks(step, column, len(each)) for name, column in zip(COLUMNS, columns, strict=True)}
    return Curves(each.cumsum() / 1000, values)


def _over_ranks(step: NDArray[np.int64], values: Array, steps: int) -> Array:
    """The mean of a column's known values at each step."""
    known = ~np.isnan(values)
    count = np.bincount(step[known], minlength=steps)
    with np.errstate(invalid="ignore"):
        return np.bincount(step[known], values[known], minlength=steps) / np.where(count, count, np.nan)


def read_runs(rows: Iterable[Result], results_dir: Path) -> tuple[dict[str, Curves], list[str]]:
    """Read the curves by run name, and the errors of unreadable files; runs without the file are skipped."""
    found, complaints = {}, []
    for row in rows:
        path = results_dir / "runs" / row.run_name / "steps.parquet"
        if path.is_file():
            try:
                found[row.run_name] = read(path)
            except BadInput as error:
                complaints.append(str(error))
    return found, complaints


class Line(NamedTuple):
    """A cell's curve over its seeds: the mean, and for two or more seeds the lowest and highest."""

    steps: Array
    seconds: Array
    mean: Array
    low: Array
    high: Array


def line(runs: Iterable[Curves], column: str) -> Line | None:
    """Average a column over seeds, at steps where all have it; long runs as means over `WINDOWS` windows.

    Returns:
        None if no step has the column for all seeds.
    """
    each = list(runs)
    length = min((len(run.seconds) for run in each), default=0)
    if not length:
        return None
    values = np.stack([run.values[column][:length] for run in each])
    seconds = np.stack([run.seconds[:length] for run in each]).mean(0)
    steps = np.flatnonzero(~np.isnan(values).any(0))
    if not len(steps):
        return None
    starts = np.unique(np.linspace(0, len(steps), min(WINDOWS, len(steps)), endpoint=False).astype(int))
    width = np.diff([*starts, len(steps)])

    def windowed(of: Array) -> Array:
        return np.add.reduceat(of, starts, axis=-1) / width

    kept = windowed(values[:, steps])
    number, elapsed = steps.astype(np.float64) + 1, seconds[steps].astype(np.float64)
    return Line(windowed(number), windowed(elapsed), kept.mean(0), kept.min(0), kept.max(0))
