"""Time to loss: how soon each cell reaches each target, and how soon its runs end.

A cell whose runs have perplexities of their own takes the times of these runs. One that takes its perplexity from
another experiment is composed: the steps are those of all seeds there, and each takes the cell's own typical step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from gradwire.base.errors import BadInput
from gradwire.base.units import UNSHAPED
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import OWN_QUALITY, Result
from gradwire.bench.report.tables.across_runs import duration
from gradwire.bench.report.tables.cells import COMPRESSOR, SEEDS, STRATEGY, WORLD, over_links
from gradwire.bench.report.tables.quality import PerplexityReference
from gradwire.bench.report.tables.table import MISSING, Column, Table, text
from gradwire.comm.topology import link_rate

TARGET = (
    text("target", "target"),
    STRATEGY,
    WORLD,
    COMPRESSOR,
    SEEDS,
    Column("reached", "reached", hint="seeds that reached the target"),
    Column("steps", "steps"),
    Column("MB sent", "megabytes", hint="gradient bytes over all ranks until then"),
)


def is_perplexity(target: str) -> bool:
    """Whether a target is a perplexity, and not a label."""
    return target[:1].isdigit()


class Cell(NamedTuple):
    """A label on a link.

    Attributes:
        strategy: The data-parallel strategy.
        world_size: The number of ranks.
        link: The link.
        compressor: The label.
        runs: The runs whose steps reach the targets, one for each seed.
        step: Seconds of a typical step on this link.
        dense: Seconds of a dense step: the baseline's.
        composed: Whether the runs are another experiment's.
    """

    strategy: str
    world_size: int
    link: str
    compressor: str
    runs: Sequence[Result]
    step: float | None
    dense: float | None
    composed: bool

    @property
    def place(self) -> tuple[str, int, str]:
        """Its strategy, world size and link."""
        return self[:3]

    @property
    def targets(self) -> list[str]:
        """The targets of its runs."""
        return list(dict.fromkeys(name for run in self.runs for name in run.steps_to_target or {}))

    def asked(self, target: str) -> list[Result]:
        """The runs that have the target: one that is a label has it for the seeds of that label."""
        return [run for run in self.runs if target in (run.steps_to_target or {})]

    def seconds(self, target: str, seeds: Container[int] | None = None) -> float:
        """Seconds to a target, the median over seeds that have it; infinite for a miss, NaN if it is unknown.

        Args:
            target: Its name.
            seeds: The seeds that count; by default all.
        """
        runs = [run for run in self.asked(target) if seeds is None or run.seed in seeds]
        if not self.composed:
            return _of_runs(runs, "time_to_target_s", target)
        return math.nan if self.step is None else seconds_to(target, runs, self.step, self.dense)

    def end(self) -> tuple[float, float]:
        """Seconds of whole runs and their final perplexity, medians over seeds; NaN if one is unknown."""
        if self.composed:
            whole = [duration(run.steps or math.nan, run, self.step, self.dense) for run in self.runs]
        else:
            whole = [(run.steps or math.nan) * (run.step_time_ms_mean or math.nan) / 1e3 for run in self.runs]
        return _middle(whole), _middle(run.val_ppl for run in self.runs)


def seconds_to(target: str, runs: Sequence[Result], step: float, dense_step: float | None) -> float:
    """Seconds to a target, the median over the seeds that have it; infinite if it is missed, NaN if it is unknown.

    Args:
        target: Its name.
        runs: The runs whose steps count.
        step: Seconds of a step after the dense ones.
        dense_step: Seconds of a dense step: the baseline's.
    """
    steps = [(run, of[target]) for run in runs if target in (of := run.steps_to_target or {})]
    return _middle(math.inf if n is None else duration(n, run, step, dense_step) for run, n in steps)


def cells(results: Iterable[Result], quality: PerplexityReference) -> list[Cell]:
    """The cells that have targets.

    Args:
        results: The rows of an experiment.
        quality: The runs whose perplexities count.
    """
    rows: defaultdict[tuple[str, int, str, str], list[Result]] = defaultdict(list)
    for row in results:
        rows[row.strategy, row.world_size, row.link, row.compressor].append(row)
    steps = {key: _typical(of) for key, of in rows.items()}
    made = []
    for key, of in rows.items():
        judged = [row for row in of if row.steps_to_target is not None]
        if judged:
            composed = judged[0].quality_from not in (None, *OWN_QUALITY)
            runs = _seeds(judged[0], quality) if composed else judged
            made.append(Cell(*key, runs, steps[key], steps.get((*key[:3], BASELINE)), composed))
    return [cell for cell in made if cell.runs]


def _typical(rows: Iterable[Result]) -> float | None:
    known = [row.typical_step_ms / 1e3 for row in rows if row.typical_step_ms is not None]
    return median(known) if known else None


def _seeds(row: Result, quality: PerplexityReference) -> list[Result]:
    try:
        return list(quality.seeds(row).values())
    except BadInput:  # that file has changed since
        return []


def ordered(links: Iterable[str]) -> list[str]:
    """Links, the fastest first."""
    return sorted(dict.fromkeys(links), key=link_rate, reverse=True)


def loads(cells: Iterable[Cell]) -> dict[str, float]:
    """Communication over computation of the baseline on each link: how much longer its step is than unshaped."""
    steps = {cell.link: cell.step for cell in cells if cell.compressor == BASELINE and cell.step}
    alone = steps.get(UNSHAPED)
    return {link: step / alone - 1 for link, step in steps.items()} if alone else {}


def by_target(cells: Sequence[Cell]) -> Table:
    """A line per target and method: medians over seeds, with misses infinite, and the seconds on each link.

    The soonest on the slowest link is the first of each target.
    """
    links = ordered(cell.link for cell in cells)
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for cell in sorted(cells, key=lambda cell: links.index(cell.link)):
        for target in cell.targets:
            runs, time = cell.asked(target), cell.seconds(target)
            steps, sent = (_of_runs(runs, field, target) for field in ("steps_to_target", "bytes_to_target"))
            reached = sum((run.steps_to_target or {})[target] is not None for run in runs)
            names = {name: getattr(cell, name) for name in ("strategy", "world_size", "compressor")}
            line = {"target": target, **names, "n": len(runs), "reached": f"{reached} of {len(runs)}"}
            line |= {
                "steps": _text(steps),
                "megabytes": _text(sent / 1e6, 3),
                **{f"{link} seconds": MISSING for link in links},
            }
            line = lines.setdefault((target, *names.values()), line)
            line |= {f"{cell.link} seconds": _text(time, 1), "order": math.inf if math.isnan(time) else time}
    made = sorted(lines.values(), key=lambda of: [of[key] for key in ("target", "strategy", "world_size", "order")])
    columns = [*TARGET, *over_links([Column("seconds", "seconds")], links)]
    return Table.of("targets", "Time to target", made, columns)


def _of_runs(runs: Iterable[Result], field: str, target: str) -> float:
    """The median over runs of what it took to reach a target, with misses infinite; NaN if a value is unknown."""
    values = [getattr(run, field) for run in runs]
    return _middle(None if of is None else math.inf if of[target] is None else of[target] for of in values)


def _middle(values: Iterable[float | None]) -> float:
    """The median; NaN if there is no value or one is unknown."""
    known = [math.nan if value is None else value for value in values]
    return float(median(known)) if known and not any(map(math.isnan, known)) else math.nan


def _text(value: float, digits: int = 0) -> str:
    return "∞" if math.isinf(value) else MISSING if math.isnan(value) else f"{value:,.{digits}f}"
