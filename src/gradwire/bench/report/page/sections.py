"""The sections of the page in order; each has its content, or one line that says why it is empty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import pandas as pd

from gradwire.base.errors import BadInput
from gradwire.base.files import read_json
from gradwire.bench.config import BASELINE
from gradwire.bench.report.page import (
    curves as line_plots,
)
from gradwire.bench.report.page import (
    fronts as pareto,
)
from gradwire.bench.report.page import (
    scaling,
    time_to_loss,
    winners,
)
from gradwire.bench.report.page import (
    speed as step_time,
)
from gradwire.bench.report.page.data import Data
from gradwire.bench.report.page.section import NO_RESULT, Section
from gradwire.bench.report.page.style import Drawing, timed
from gradwire.bench.report.page.time_to_target import plots as time_to_target_plots
from gradwire.bench.report.page.validity import environments, stores, validity
from gradwire.bench.report.rows import curves
from gradwire.bench.report.rows.measurements import measurement_of, usable
from gradwire.bench.report.rows.notes import mostly_float32
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.rows.traffic import as_computed
from gradwire.bench.report.tables import columns
from gradwire.bench.report.tables.cells import GROUP, command, of_group, on_one_link
from gradwire.bench.report.tables.columns import Column
from gradwire.bench.report.tables.headline import Finding
from gradwire.bench.report.tables.predictions import ppl_percent, unpredictable
from gradwire.bench.report.tables.table import Table
from gradwire.bench.report.tables.time_to_loss import by_goal, records
from gradwire.bench.statistics.cost_model import Model, leave_one_link_out


def sections(data: Data) -> Iterator[Section]:
    """All sections."""
    for make in (
        headline,
        validity,
        all_cells,
        fronts,
        time_to_target,
        loss,
        step_times,
        scaling_section,
        winners_section,
        gradient_error,
        stores,
        environments,
    ):
        yield make(data)


def headline(data: Data) -> Section:
    """Which compressor wins in which regime, and quality over what the first number is of."""
    made = Section.of("headline")
    made.findings = data.findings
    if data.cells is None:
        made.absent = NO_RESULT
    elif not made.findings:
        made.absent = f"no compressor and {BASELINE} ran on several ranks"
    else:
        first = made.findings[0]
        drawing = next(beside(data, first), None)
        shared = data.shared and first.cost != "bytes"
        made.plots = [] if drawing is None else [lambda: timed(drawing, shared)()._replace(name="headline")]
    return made


def beside(data: Data, finding: Finding) -> Iterator[Drawing]:
    """The figures that a finding's number may have beside it, the best first."""
    group, cost = finding.group, finding.cost
    if cost == "target":
        yield from time_to_loss.plots([one for one in data.times if one.place[:2] == group[:2]], data.looks)
        cost = "time"
    if data.cells is not None:
        cells = data.cells[(data.cells[GROUP] == list(group)).all(axis=1)]
        yield from pareto.plots(cost, cells, data.runs, data.looks)


def all_cells(data: Data) -> Section:
    """The table of all cells."""
    made = Section.of("cells")
    if data.cells is None:
        made.absent = NO_RESULT
        return made
    runs: defaultdict[tuple[str, int, str, str], list[Result]] = defaultdict(list)
    for row in data.ok:
        runs[row.strategy, row.world_size, row.link, row.compressor].append(row)
    records = data.cells.to_dict("records")
    of_cell = [runs[cell["strategy"], cell["world_size"], cell["link"], cell["compressor"]] for cell in records]
    for cell, rows in zip(records, of_cell, strict=True):
        cell["marks"] = marks(cell, rows, data.shared) or "valid"
    made.tables = [
        replace(
            Table.of("cells", "All cells", records, columns.CELLS).trimmed(),
            commands=[command(rows, data.results_dir) for rows in of_cell],
            fails=[bool(cell["gated"]) for cell in records],
        )
    ]
    if (data.cells["n"] < 2).any():
        made.notes = ["A single seed (n = 1) has no range."]
    if (data.cells["quality_n"] > data.cells["n"]).any():
        named = sorted({row.quality_from.partition(": ")[0] for row in data.ok if row.quality_from})
        most = int(data.cells["quality_n"].max())
        made.notes = [
            *made.notes,
            f"Perplexities against fp32 are from {', '.join(named)}, over up to {most} seeds; n counts timed runs.",
        ]
    return made


def marks(cell: Mapping[Any, Any], rows: Sequence[Result], shared: bool = False) -> str:
    """The marks of a cell."""
    found = {
        "worse than fp32 + 1 %": cell["gated"],
        "no perplexity": pd.isna(cell["val_ppl"]),
        "one seed": cell["n"] < 2,
        "times shared": shared,
        "meter ≠ trace": any(row.meter_agrees is False for row in rows),
        "bytes ≠ formula": any(as_computed(row) is False for row in rows),
        "mostly float32": any(map(mostly_float32, rows)),
        "non-finite": any(row.nonfinite_steps for row in rows),
    }
    return ", ".join(mark for mark, holds in found.items() if holds)


def fronts(data: Data) -> Section:
    """Pareto fronts."""
    made = Section.of("pareto")
    if data.cells is None:
        made.absent = NO_RESULT
        return made
    plots = {cost: pareto.plots(cost, data.cells, data.runs, data.looks) for cost in pareto.COSTS}
    made.plots = [*plots["bytes"], *(timed(plot, data.shared) for plot in plots["time"])]
    if not made.plots:
        made.absent = f"no two cells with a perplexity, one of them {BASELINE}, share strategy, world size and link"
    return made


def time_to_target(data: Data) -> Section:
    """Time to the experiment's targets."""
    made = Section.of("targets")
    if data.times:
        made.tables = [Table.of("targets", "Time to target", records(data.times), columns.TARGETS)]
        drawn = [
            *time_to_loss.plots(data.times, data.looks),
            *time_to_target_plots(by_goal(data.times), data.looks),
        ]
        made.plots = [timed(plot, data.shared) for plot in drawn]
    else:
        made.absent = "the experiment has no target (`targets:` in the configuration)"
    return made


def loss(data: Data) -> Section:
    """Training loss over steps and seconds, and validation loss over steps."""
    made = Section.of("loss", windows=curves.WINDOWS)
    lines = data.lines("loss")
    if not lines:
        made.absent = "no run has a steps.parquet" if data.ok else NO_RESULT
        return made
    made.plots = [
        *line_plots.plots(line_plots.LOSS_STEPS, {group: lines[group] for group in on_one_link(lines)}, data.looks),
        *(timed(plot, data.shared) for plot in line_plots.plots(line_plots.LOSS_SECONDS, lines, data.looks)),
    ]
    validated = data.lines("val_loss")
    several = {group: validated[group] for group in on_one_link(validated) if evaluated_twice(validated[group])}
    made.plots += line_plots.plots(line_plots.VALIDATION, several, data.looks)
    return made


def evaluated_twice(lines: line_plots.Lines) -> bool:
    """Whether a group's validation losses make a curve: those of a last evaluation alone are in the table."""
    return any(len(line.steps) > 1 for line in lines.values())


def step_times(data: Data) -> Section:
    """Where a step's time goes."""
    made = Section.of("step-time")
    profiles = {row.run_name: profile for row in data.ok if (profile := _profile(data, row))}
    if not profiles:
        made.absent = "no run has a profile.json with profiled steps" if data.ok else NO_RESULT
        return made
    plots, records = [], []
    for group in data.groups:
        rows = [row for row in of_group(data.ok, group) if row.run_name in profiles]
        if not rows:
            continue
        times = pd.DataFrame([step_time.parts(profiles[row.run_name]) for row in rows])
        means = times.groupby([row.compressor for row in rows]).mean()
        means = means.loc[means.sum(axis=1).sort_values(kind="stable").index]
        plots.append(timed(partial(step_time.draw, group, means), data.shared))
        records += [
            {**group._asdict(), "compressor": label, **values} for label, values in means.to_dict("index").items()
        ]
    parts = [Column(f"{part}, ms", part, "{:,.2f}") for part in step_time.PARTS]
    table = Table.of("step-time", "Milliseconds of the mean step", records, [*columns.CELL, *parts])
    made.plots, made.tables = plots, [table]
    return made


def scaling_section(data: Data) -> Section:
    """Scaling over world sizes."""
    made = Section.of("scaling")
    if data.cells is None:
        made.absent = NO_RESULT
        return made
    made.plots = [timed(plot, data.shared) for plot in scaling.plots(data.runs, data.looks)]
    if not made.plots:
        made.absent = "no strategy ran at two world sizes"
        return made
    known = [row for row in data.ok if row.scaling_efficiency is not None]
    if known:
        frame = pd.DataFrame([row.model_dump(include={*CELL_KEYS, "scaling_efficiency"}) for row in known])
        means = frame.groupby(list(CELL_KEYS), sort=False)["scaling_efficiency"].mean().reset_index()
        means["efficiency_percent"] = 100 * means["scaling_efficiency"]
        records = means.to_dict("records")
        made.tables = [Table.of("scaling", "Tokens/s per rank, in percent of one rank's", records, columns.SCALING)]
    return made


CELL_KEYS = ("strategy", "world_size", "link", "compressor")


def winners_section(data: Data) -> Section:
    """The map of winners."""
    path = data.results_dir / "results.jsonl"
    try:
        chosen = usable([row for row in data.results if unpredictable(row) is None], path)  # without islands
    except BadInput as error:
        return replace(Section.of("winners"), absent=str(error).removeprefix(f"{path}: ").removesuffix("."))
    model = Model(tuple(map(measurement_of, chosen)))
    errors = [abs(one.errors[0]) for one in leave_one_link_out(model.measurements)]
    off = f" Predicted from the other links, the median step is {100 * median(errors):.0f} % off." if errors else ""
    made = Section.of("winners", cells=len(chosen), world=chosen[0].world_size, latency=winners.LATENCY * 1e6, off=off)
    plots = []
    for strategy in dict.fromkeys(one.strategy for one in model.measurements):
        labels = [label for own, label in model.by_label if own == strategy]
        worse = ppl_percent([row for row in chosen if row.strategy == strategy], data.quality)
        within = [label for label in labels if worse.get(label, float("inf")) <= 1]
        plots.append(partial(winners.draw, model, strategy, labels, "any perplexity", data.looks))
        if len(within) > 1:
            plots.append(partial(winners.draw, model, strategy, within, "perplexity within 1 %", data.looks))
    made.plots = [timed(plot, data.shared) for plot in plots]
    return made


def gradient_error(data: Data) -> Section:
    """Gradient error and residual norm."""
    made = Section.of("gradient-error")
    errors, residuals = data.lines("grad_rel_error"), data.lines("residual_norm")
    made.plots = [
        *line_plots.plots(
            line_plots.GRADIENT_ERROR, {group: errors[group] for group in on_one_link(errors)}, data.looks
        ),
        *line_plots.plots(
            line_plots.RESIDUAL, {group: residuals[group] for group in on_one_link(residuals)}, data.looks
        ),
    ]
    if not made.plots:
        made.absent = "no run sampled its gradients (`eval_every`)" if data.ok else NO_RESULT
    elif not errors or not residuals:
        lacking = "gradient error was sampled" if not errors else "run has a residual: none uses error feedback"
        made.notes = [f"No {lacking}."]
    return made


def _profile(data: Data, row: Result) -> dict[str, Any] | None:
    """A run's profile, if it has profiled steps."""
    path = data.results_dir / "runs" / row.run_name / "profile.json"
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = read_json(path)
        if not found["steps"]:  # ended before a profiled step
            return None
        step_time.parts(found)
    except (BadInput, KeyError, TypeError) as error:
        data.notes.append(f"{path} is unusable ({error!r}).")
        return None
    return found
