"""Sections of the page, by question; a question without an answer has none."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from gradwire.base.errors import BadInput, listed
from gradwire.base.files import digest, read_json
from gradwire.bench.config import BASELINE
from gradwire.bench.report.page import curves, figures
from gradwire.bench.report.page.style import Drawing, Look, looks, timed
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.cells import (
    ALL_CELLS,
    BAD,
    EFFICIENCY,
    GROUP,
    NAMES,
    Group,
    by_method,
    on_one_link,
    over_links,
)
from gradwire.bench.report.tables.checks import Gate, gates, privacy, validations
from gradwire.bench.report.tables.comparison import DIFFERENCES, compared
from gradwire.bench.report.tables.glance import links
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.summary import METHOD, STEPS, distinct, versions
from gradwire.bench.report.tables.table import MISSING, Column, Table, text
from gradwire.bench.report.tables.time_to_loss import by_target
from gradwire.bench.statistics.seeds import TOLERANCE, Estimate
from gradwire.comm.topology import link_rate

STORES = (text("run", "run"), text("check", "name"), text("result", "result"), text("detail", "detail"))
ENVIRONMENTS = (Column("ranks", "ranks", "{:d}"), text("of runs", "runs"), text("rank numbers", "numbers"))


class Section(NamedTuple):
    """A part of the page.

    Attributes:
        key: Its id.
        question: The question that it answers.
        plots: Figures to draw; the first is open.
        tables: Tables, folded.
        gates: Checks.
        properties: Terms and their values, folded.
        notes: Further notes.
    """

    key: str
    question: str
    plots: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    gates: Sequence[Gate] = ()
    properties: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Data(Results):
    """Input of all sections: an experiment, and what its figures need."""

    @cached_property
    def looks(self) -> dict[str, Look]:
        """How each label is drawn, on every figure."""
        return looks(sorted({row.compressor for row in self.rows}))

    @cached_property
    def run_curves(self) -> dict[str, curves.Curves]:
        """The runs' curves from ``steps.parquet``."""
        by_run, complaints = curves.read_runs(self.ok, self.results_dir)
        self.notes.extend(complaints)
        return by_run

    @cached_property
    def first(self) -> tuple[Group, str] | None:
        """The group of the first figure, the slowest link's with the most cells, and its cost; None without one."""
        several = [group for group in self.groups if group.world_size > 1]
        if self.cells is None or not several:
            return None
        sizes = self.cells.dropna(subset="worse_percent").groupby(GROUP).size()
        group = max(several, key=lambda group: (-link_rate(group.link), sizes.get(tuple(group), 0)))
        return group, "bytes" if link_rate(group.link) == np.inf else "time"

    def figure(self, cost: str, group: Group) -> Drawing | None:
        """The figure of perplexity over a cost."""
        drawing = None if self.cells is None else figures.quality(cost, group, self.cells, self.runs, self.looks)
        return timed(drawing, self.shared) if drawing is not None and cost == "time" else drawing

    def figures(self, cost: str, of_groups: Iterable[Group]) -> list[Drawing]:
        """The figures of perplexity over a cost but the first one of the page."""
        drawings = [self.figure(cost, group) for group in of_groups if (group, cost) != self.first]
        return [drawing for drawing in drawings if drawing is not None]

    def lines(self, column: str) -> dict[Group, dict[str, curves.Line]]:
        """A column of the curves over seeds, by group and label; unmeasured cells are left out."""
        lines: dict[Group, dict[str, curves.Line]] = {}
        for group in self.groups:
            runs: defaultdict[str, list[curves.Curves]] = defaultdict(list)
            for row in group.rows(self.ok):
                if row.run_name in self.run_curves:
                    runs[row.compressor].append(self.run_curves[row.run_name])
            for label in sorted(runs, key=lambda label: (label != BASELINE, label)):
                if (line := curves.line(runs[label], column)) is not None:
                    lines.setdefault(group, {})[label] = line
        return lines


def cost(data: Data) -> Section:
    """Perplexity over bytes and world sizes, losses over steps, and what happens to the gradient."""
    kinds = {"val_loss": curves.VALIDATION, "loss": curves.LOSS_STEPS}
    kinds |= {"grad_rel_error": curves.GRADIENT_ERROR, "residual_norm": curves.RESIDUAL}
    plots = [*data.figures("bytes", on_one_link(data.groups)), *over_ranks(data)]
    plots += [plot for column, kind in kinds.items() for plot in over_steps(data, kind, data.lines(column))]
    return Section("cost", "What does it cost?", plots)


def save(data: Data) -> Section:
    """Time to the experiment's targets, perplexity over step time, losses over seconds, and steps on each link."""
    with_times = {
        group: {label: line for label, line in of_group.items() if not np.isnan(line.seconds).any()}
        for group, of_group in data.lines("loss").items()
    }
    drawings = [
        *figures.time_to_loss(data.times, data.looks),
        *curves.plots(curves.LOSS_SECONDS, with_times, data.looks),
    ]
    plots = [timed(plot, data.shared) for plot in drawings]
    tables = [by_target(data.times)] if data.times else []
    if data.cells is not None and (of_links := links(data)):
        lines = by_method(data.cells).to_dict("records")
        tables.append(Table.of("steps", "Step time on each link", lines, [*METHOD, *over_links(STEPS, of_links)]))
    timed_groups = [group for group in data.groups if group.world_size > 1]
    return Section("save", "What does it save?", [*data.figures("time", timed_groups[::-1]), *plots], tables)


def over_ranks(data: Data) -> Iterator[Drawing]:
    """The cost of methods in perplexity, over world sizes."""
    costs: defaultdict[str, defaultdict[str, dict[int, Estimate]]] = defaultdict(lambda: defaultdict(dict))
    for group in on_one_link(data.groups):
        for label in dict.fromkeys(row.compressor for row in group.rows(data.ok)):
            quality = data.judged[group.strategy, group.world_size, label, group.link]
            if quality.worse and label != quality.reference:
                costs[group.strategy][label][group.world_size] = quality.difference
    for strategy, labels in costs.items():
        if several := {label: of_label for label, of_label in labels.items() if len(of_label) > 1}:
            yield partial(figures.draw_ranks, strategy, several, data.looks)


def over_steps(data: Data, kind: curves.Kind, lines: Mapping[Group, curves.Lines]) -> Iterator[Drawing]:
    """Figures over steps, which do not depend on the link, on one link; a point alone is no curve."""
    several = {
        group: {label: line for label, line in lines[group].items() if len(line.steps) > 1}
        for group in on_one_link(lines)
    }
    return curves.plots(kind, dict(sorted(several.items(), key=lambda item: -len(item[1]))), data.looks)


def time(data: Data) -> Section:
    """Where a step's time goes, and scaling over world sizes."""
    bars, parts = step_times(data)
    tables = [*([parts] if parts.rows else []), *efficiencies(data)]
    lines = figures.scaling(data.runs, data.looks) if data.ok else ()
    return Section("time", "Where does the time go?", [timed(plot, data.shared) for plot in (*bars, *lines)], tables)


def step_times(data: Data) -> tuple[list[Drawing], Table]:
    """The parts of a step, as bars and as a table."""
    parts = {row.run_name: of_run for row in data.ok if (of_run := _step_parts(data, row))}
    plots: list[Drawing] = []
    lines: list[dict[Any, Any]] = []
    for group in data.groups:
        rows = [row for row in group.rows(data.ok) if row.run_name in parts]
        if not rows:
            continue
        times = pd.DataFrame([parts[row.run_name] for row in rows])
        means = times.groupby([row.compressor for row in rows]).mean()
        means = means.loc[means.sum(axis=1).sort_values(kind="stable").index]
        plots.append(partial(figures.draw_step, group, means))
        of_labels = means.to_dict("index").items()
        lines += [group._asdict() | {"compressor": label} | dict(values) for label, values in of_labels]
    columns = [Column(f"{part}, ms", part, "{:,.2f}") for part in figures.STEP_PARTS]
    return plots, Table.of("step-time", "Milliseconds of the mean step", lines, [*NAMES, *columns])


def _step_parts(data: Data, row: Result) -> dict[str, float] | None:
    """The parts of a run's mean step, if it has profiled steps."""
    path = data.results_dir / "runs" / row.run_name / "profile.json"
    if not path.is_file():
        return None
    try:
        profile = read_json(path)
        return figures.step_parts(profile) if profile["steps"] else None  # none if it ended before a profiled step
    except (BadInput, KeyError, TypeError) as error:
        data.notes.append(f"{path} is unusable ({error!r}).")
        return None


def efficiencies(data: Data) -> Iterator[Table]:
    """Tokens per second of a rank over those of one rank alone."""
    fields = [*GROUP, "compressor", "scaling_efficiency"]
    frame = pd.DataFrame([[getattr(row, name) for name in fields] for row in data.ok], columns=fields).dropna()
    if len(frame):
        means = frame.groupby(fields[:-1], sort=False).mean().reset_index()
        means["efficiency_percent"] = 100 * means["scaling_efficiency"].astype(float)
        lines = means.to_dict("records")
        yield Table.of("scaling", "Tokens/s per rank, in percent of one rank's", lines, [*NAMES, EFFICIENCY])


def valid(data: Data) -> Section:
    """The checks, all cells, the settings, and the environment of every rank."""
    measured = [row for row in data.rows if row.status in ("ok", "diverged")]
    steps = distinct(sorted(row.steps for row in measured if row.steps))
    properties = {
        "runs": f"{len(data.rows)} in {len({row.run_name.rpartition('/')[0] for row in data.rows})} cells",
        "strategies": distinct(row.strategy for row in data.rows),
        "world sizes": distinct(row.world_size for row in data.rows),
        "links": distinct(row.link for row in data.rows),
        "seeds": distinct(row.seed for row in data.rows),
        "model": distinct(
            f"{row.model} ({row.parameters:,} parameters)" if row.parameters else row.model for row in measured
        ),
        "dataset": distinct(row.dataset for row in measured),
        "training": distinct(
            f"{steps} steps of {row.batch_size} × {row.max_length} tokens per rank, {row.precision}" for row in measured
        ),
        "optimizers": distinct(row.optimizer for row in measured),
        "privacy": distinct(map(privacy, measured)),
        "backend": distinct(f"{row.backend} on {row.device}" for row in measured),
        "versions": distinct(map(versions, measured), "; "),
    }
    shared, ranks = environments(data)
    tables = [table for table in (all_cells(data), stores(data), ranks) if table.rows]
    made = [(name, text) for name, text in (*properties.items(), *shared) if text]
    notes = []
    if data.cells is not None and data.cells["borrowed"].any():
        named = data.quality.name
        notes = [f"Cells that were not evaluated have the perplexities of {named}: “ppl n” counts their seeds."]
    return Section("valid", "Are the numbers valid?", (), tables, gates(data), made, notes)


def all_cells(data: Data) -> Table:
    """The table of all cells."""
    runs: defaultdict[tuple[str, int, str, str], list[Result]] = defaultdict(list)
    for row in data.ok:
        runs[row.strategy, row.world_size, row.link, row.compressor].append(row)
    cells = [] if data.cells is None else data.cells.to_dict("records")
    of_cell = [runs[cell["strategy"], cell["world_size"], cell["link"], cell["compressor"]] for cell in cells]
    for cell, rows in zip(cells, of_cell, strict=True):
        cell["marks"] = marks(cell, rows, data.shared) or "valid"
    commands = [command(rows, data.results_dir) for rows in of_cell]
    made = Table.of("cells", "All cells", cells, ALL_CELLS).trimmed()
    return replace(made, commands=commands, fails=[cell["verdict"] in BAD for cell in cells])


def marks(cell: Mapping[Any, Any], rows: Sequence[Result], shared: bool = False) -> str:
    """The marks of a cell."""
    marked = {
        f"worse than {cell['reference']}": cell["verdict"] == "worse",
        f"mean more than {TOLERANCE:g} % above {cell['reference']}": cell["worse_percent"] > TOLERANCE
        and cell["verdict"] != "worse",
        **{f"{cell[status]} {status}": cell[status] for status in ("diverged", "failed")},
        "no perplexity": pd.isna(cell["val_ppl"]),
        "one seed": cell["n"] < 2,
        "times shared": shared,
        "meter ≠ trace": any(row.meter_agrees is False for row in rows),
        "bytes ≠ formula": any(row.as_computed is False for row in rows),
        "mostly float32": any(row.mostly_float32 for row in rows),
        "non-finite": any(row.nonfinite_steps for row in rows),
    }
    return ", ".join(mark for mark, holds in marked.items() if holds)


def command(runs: Sequence[Result], results_dir: Path) -> str:
    """The shell command that repeats a cell's runs, from the folder that has ``results/``."""
    folder = Path("results") / results_dir.resolve().name
    config = folder / "config.json" if (results_dir / "config.json").is_file() else Path("CONFIG.yaml")
    paths = [str(folder / "runs" / row.run_name / "record.json") for row in runs]
    return shlex.join(["gradwire", "run", str(config), "--", "--force", *paths])


def stores(data: Data) -> Table:
    """The gradient stores' validation."""
    lines = [
        {
            "run": run,
            "name": check["name"],
            "result": "passed" if check["passed"] else "FAILED",
            "detail": str(check.get("detail") or ""),
        }
        for run, checks in validations(data.results_dir).items()
        for check in checks
    ]
    fails = [line["result"] == "FAILED" for line in lines]
    return replace(Table.of("stores", "Checks of each store of gradients", lines, STORES), fails=fails)


def environments(data: Data) -> tuple[list[tuple[str, str]], Table]:
    """The environment of every rank: what all share, and a table of the others."""
    ranks: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    by_digest: dict[str, dict[str, Any]] = {}
    for row in data.rows:
        for path in sorted((data.results_dir / "runs" / row.run_name / "environment").glob("rank*.json")):
            try:
                values = read_json(path)
                rank = values.pop("rank")
            except (BadInput, AttributeError, KeyError) as error:
                data.notes.append(f"{path} is unusable ({error}).")
                continue
            values = {
                name: value for name, value in values.items() if name not in ("clocks", "world_size")
            }  # they vary
            by_digest[digest(values)] = values
            ranks[digest(values)].append((row.run_name, rank))
    first, *others = by_digest.values() if by_digest else [{}]
    shared = {name for name, value in first.items() if all(other.get(name) == value for other in others)}
    differing = sorted({name for values in by_digest.values() for name in values} - shared)
    lines = [
        {name: _text(values.get(name)) or MISSING for name in differing}
        | {
            "ranks": len(ranks[key]),
            "runs": listed(sorted({run for run, _ in ranks[key]})),
            "numbers": ", ".join(map(str, sorted({rank for _, rank in ranks[key]}))),
        }
        for key, values in by_digest.items()
    ]
    shown = [*ENVIRONMENTS, *(text(name, name) for name in differing)]
    properties = [(name, _text(first[name])) for name in first if name in shared]
    return properties, Table.of("environment", "The environment of every rank", lines, shown)


def _text(value: Any) -> str:
    """Format a value of an environment."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(of)}" for name, of in value.items() if of is not None)
    return "" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)


def comparison(data: Results, other: Results) -> Section:
    """The differences of another experiment.

    Raises:
        BadInput: If the experiments share no run with a result.
    """
    tables, notes = compared(data, other)
    question = f"What differs in {other.results_dir.as_posix()}?"
    return Section("compare", question, (), tables, (), (), [DIFFERENCES, *notes])


def sections(data: Data) -> list[Section]:
    """The sections that have something to show."""
    made = [section(data) for section in (cost, save, time, valid)]
    return [section for section in made if section.plots or section.tables or section.gates]
