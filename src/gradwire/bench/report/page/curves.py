"""Curves from ``steps.parquet``: losses, gradient error and residual norm over steps or seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from gradwire.base.errors import BadInput
from gradwire.bench.report.page.style import Drawing, Look, Plot, axes, group_title, logarithmic
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.cells import Group
from gradwire.bench.steps import durations
from gradwire.bench.steps import read as read_steps

COLUMNS = ("loss", "val_loss", "grad_rel_error", "residual_norm")
WINDOWS = 100
Array = NDArray[np.float64]


class Curves(NamedTuple):
    """One run, step by step: means over ranks, and the slowest rank's step times.

    Attributes:
        seconds: Since the first step began, after each step; evaluations are left out. NaN if ranks were simulated.
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
    milliseconds = durations(step, ms)
    count = len(milliseconds)
    values = {name: _over_ranks(step, column, count) for name, column in zip(COLUMNS, columns, strict=True)}
    return Curves(milliseconds.cumsum() / 1000, values)


def _over_ranks(step: NDArray[np.int64], values: Array, steps: int) -> Array:
    """The mean of a column's known values at each step."""
    known = ~np.isnan(values)
    count = np.bincount(step[known], minlength=steps)
    with np.errstate(invalid="ignore"):
        return np.bincount(step[known], values[known], minlength=steps) / np.where(count, count, np.nan)


def read_runs(rows: Iterable[Result], results_dir: Path) -> tuple[dict[str, Curves], list[str]]:
    """Read the curves by run name, and the errors of unreadable files; runs without the file are skipped."""
    curves, complaints = {}, []
    for row in rows:
        path = results_dir / "runs" / row.run_name / "steps.parquet"
        if path.is_file():
            try:
                curves[row.run_name] = read(path)
            except BadInput as error:
                complaints.append(str(error))
    return curves, complaints


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
    runs = list(runs)
    length = min((len(run.seconds) for run in runs), default=0)
    if not length:
        return None
    values = np.stack([run.values[column][:length] for run in runs])
    seconds = np.stack([run.seconds[:length] for run in runs]).mean(0)
    steps = np.flatnonzero(~np.isnan(values).any(0))
    if not len(steps):
        return None
    starts = np.unique(np.linspace(0, len(steps), min(WINDOWS, len(steps)), endpoint=False).astype(int))
    width = np.diff([*starts, len(steps)])

    def windowed(values: Array) -> Array:
        return np.add.reduceat(values, starts, axis=-1) / width

    kept = windowed(values[:, steps])
    number, elapsed = steps.astype(np.float64) + 1, seconds[steps].astype(np.float64)
    return Line(windowed(number), windowed(elapsed), kept.mean(0), kept.min(0), kept.max(0))


Lines = Mapping[str, Line]  # by label


class Kind(NamedTuple):
    """A kind of figure."""

    name: str
    along: str  # a field of Line
    x: str
    y: str
    log: bool = False
    dots: bool = False  # sampled at few steps


LOSS_STEPS = Kind("loss-steps", "steps", "optimizer step", "training loss, nats per token")
LOSS_SECONDS = Kind("loss-seconds", "seconds", "seconds of training", "training loss, nats per token")
VALIDATION = Kind("validation-loss", "steps", "optimizer step", "validation loss, nats per token", dots=True)
GRADIENT_ERROR = Kind("gradient-error", "steps", "optimizer step", "relative error of the gradient", True, True)
RESIDUAL = Kind("residual-norm", "steps", "optimizer step", "norm of the residual", dots=True)


def plots(kind: Kind, by_group: Mapping[Group, Lines], looks: Mapping[str, Look]) -> Iterator[Drawing]:
    """A figure for each group."""
    for group, lines in by_group.items():
        if lines:
            yield partial(draw, kind, group, lines, looks)


def draw(kind: Kind, group: Group, lines: Lines, looks: Mapping[str, Look]) -> Plot:
    """One group: a line for each label's mean over seeds, a band from the lowest seed to the highest."""
    chart, ax = axes(group_title(*group), kind.x, kind.y)
    for i, (label, line) in enumerate(lines.items()):
        look, x = looks[label], getattr(line, kind.along)
        if (line.high > line.low).any():
            ax.fill_between(x, line.low, line.high, color=look.colour, alpha=0.15, lw=0)
        every = 1 if kind.dots else (i % 5 + 2, max(len(x) // 6, 1))
        (chart.handles[label],) = ax.plot(x, line.mean, **look.line, markevery=every, ms=4)
        chart.tip(chart.handles[label], f"{label}: {line.mean[-1]:.4g} at {kind.x} {x[-1]:,.4g}")
    if kind.along == "steps":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if kind.log:
        logarithmic(ax, "y")
    alt = f"{kind.y} over {kind.x}, {group_title(*group)}: {', '.join(lines)}."
    return chart.plot(f"{kind.name}-{group.slug}", alt)
