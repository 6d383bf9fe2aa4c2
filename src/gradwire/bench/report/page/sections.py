"""The sections of the page in order; each has its content, or one line with the reason why it is empty."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from gradwire.base.errors import BadInput
from gradwire.base.files import digest, read_json
from gradwire.bench.config import BASELINE
from gradwire.bench.report.page import curves, fronts, speed
from gradwire.bench.report.page.data import Content, Data, Section, section
from gradwire.bench.report.page.style import Drawing, timed
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.cells import (
    AGAINST,
    ALL_BYTES_HINT,
    ALL_CELLS,
    COMPRESSOR,
    EFFICIENCY,
    GROUP,
    NAMES,
    WORSE,
    Group,
    on_one_link,
)
from gradwire.bench.report.tables.checks import finished, gates, listed, privacy, validations
from gradwire.bench.report.tables.comparison import QUANTITIES, common, differences, over_cells, table, unlike
from gradwire.bench.report.tables.headline import Finding, findings, of_optimizers, place
from gradwire.bench.report.tables.measurements import measurement_of, unpredictable, usable
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.summary import distinct, versions
from gradwire.bench.report.tables.table import MISSING, Column, Table, text
from gradwire.bench.report.tables.tiers import ceilings
from gradwire.bench.report.tables.time_to_loss import TARGETS, records
from gradwire.bench.statistics.cost_model import Model, leave_one_link_out
from gradwire.bench.statistics.seeds import TOLERANCE, Estimate

NO_RESULT = "no run has a result"
CHOICE = (
    COMPRESSOR,
    Column("fewer bytes", "saved", "{:.1f}", " ×", hint=ALL_BYTES_HINT),
    WORSE.titled("perplexity", form="{:+z.1f}"),
    AGAINST,
    Column("faster", "speed_up", "{:.2f}", " ×", base=BASELINE, hint="step time of none over this one's"),
)
STORES = (text("run", "run"), text("check", "name"), text("result", "result"), text("detail", "detail"))
ENVIRONMENTS = (Column("ranks", "ranks", "{:d}"), text("of runs", "runs"), text("rank numbers", "numbers"))


def headline(data: Data) -> Content:
    """Runs that failed, which compressor wins in which regime, and quality over what it was chosen by."""
    lost = failures(data.rows, "failed", "diverged")
    answers = findings(data)
    if data.cells is None or not answers:
        absent = NO_RESULT if data.cells is None else f"no compressor and {BASELINE} ran on several ranks"
        return {"failures": lost, "notes": [f"No finding: {absent}."]} if lost else absent
    first = answers[0]
    checks = gates(data)
    broken = [gate for gate in checks if gate.state == "failed" and gate != finished(data.rows)]
    notes = [f"A check failed: {gate.name}: {gate.text}" for gate in broken]
    content = {
        "failures": lost,
        "notes": notes,
        "findings": answers,
        "asides": of_optimizers(data),
        "tables": [choice(data.cells, first)],
    }
    drawing = next(figures_of(data, first), None)
    if drawing is None:
        return content
    shown = timed(drawing, data.shared and first.cost != "bytes")
    return content | {"plots": [lambda: shown()._replace(name="headline")]}


def failures(rows: Sequence[Result], *statuses: str) -> list[dict[str, Any]]:
    """Group runs without a result that ended alike: their ``status``, the ``reason``, and the names of the ``runs``."""
    runs: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.status in statuses:
            runs[row.status, row.reason or "no reason was given"].append(row.run_name)
    return [{"status": status, "reason": reason, "runs": names} for (status, reason), names in runs.items()]


def choice(cells: pd.DataFrame, finding: Finding) -> Table:
    """The compressors of a finding's regime: what each saves, costs and gains."""
    of_group = cells[(cells[GROUP] == list(finding.group)).all(axis=1)]
    lines = of_group.sort_values("speed_up", ascending=False).to_dict("records")
    return Table.of("choice", f"The choice: {finding.regime}, {place(finding.group.link)}", lines, CHOICE)


def figures_of(data: Data, finding: Finding) -> Iterator[Drawing]:
    """The figures that may stand next to a finding's number, the best first."""
    group, cost = finding.group, finding.cost
    if cost == "target":
        yield from fronts.time_to_loss([cell for cell in data.times if cell.place[:2] == group[:2]], data.looks)
        cost = "time"
    if data.cells is not None:
        cells = data.cells[(data.cells[GROUP] == list(group)).all(axis=1)]
        yield from fronts.plots(cost, cells, data.runs, data.looks)


def validity(data: Data) -> Content:
    """The runs and their settings, and whether they are valid."""
    results = data.rows
    measured = [row for row in results if row.status in ("ok", "diverged")]
    precisions = {row.precision for row in measured}
    steps = distinct(sorted(row.steps for row in measured if row.steps))
    optimizers = distinct(row.optimizer for row in measured)
    properties = {
        "runs": f"{len(results)} in {len({row.run_name.rpartition('/')[0] for row in results})} cells",
        "compressors": distinct(row.compressor for row in results),
        "strategies": distinct(row.strategy for row in results),
        "world sizes": distinct(row.world_size for row in results),
        "links": distinct(row.link for row in results),
        "seeds": distinct(row.seed for row in results),
        "model": distinct(
            f"{row.model} ({row.parameters:,} parameters)" if row.parameters else row.model for row in measured
        ),
        "dataset": distinct(row.dataset for row in measured),
        "training": distinct(
            f"{steps} steps of {row.batch_size} × {row.max_length} tokens per rank, {optimizers}" for row in measured
        ),
        "precision": ", ".join(sorted(precisions)) if precisions != {"fp32"} else "",
        "privacy": distinct(map(privacy, measured)),
        "backend": distinct(f"{row.backend} on {row.device}" for row in measured),
        "versions": distinct(map(versions, measured), "; "),
    }
    return {
        "properties": [(name, text) for name, text in properties.items() if text],
        "gates": [*gates(data), ceilings(data)],
        "failures": failures(results, "skipped"),
    }


def all_cells(data: Data) -> Content:
    """The table of all cells."""
    if data.cells is None:
        return NO_RESULT
    runs: defaultdict[tuple[str, int, str, str], list[Result]] = defaultdict(list)
    for row in data.ok:
        runs[row.strategy, row.world_size, row.link, row.compressor].append(row)
    cells = data.cells.to_dict("records")
    of_cell = [runs[cell["strategy"], cell["world_size"], cell["link"], cell["compressor"]] for cell in cells]
    for cell, rows in zip(cells, of_cell, strict=True):
        cell["marks"] = marks(cell, rows, data.shared) or "valid"
    commands = [command(rows, data.results_dir) for rows in of_cell]
    made = Table.of("cells", "All cells", cells, ALL_CELLS).trimmed()
    notes = ["A single seed (n = 1) has no range."] if (data.cells["n"] < 2).any() else []
    if data.cells["borrowed"].any():
        named = data.quality.name
        notes.append(f"Cells that were not evaluated have the perplexities of {named}: “ppl n” counts their seeds.")
    fails = [bool(cell["gated"]) for cell in cells]
    return {"tables": [replace(made, commands=commands, fails=fails)], "notes": notes}


def marks(cell: Mapping[Any, Any], rows: Sequence[Result], shared: bool = False) -> str:
    """The marks of a cell."""
    marked = {
        f"more than {TOLERANCE:g} % above {cell['reference']}": cell["worse_percent"] > TOLERANCE,
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


def pareto(data: Data) -> Content:
    """Pareto fronts."""
    if data.cells is None:
        return NO_RESULT
    plots = {cost: fronts.plots(cost, data.cells, data.runs, data.looks) for cost in fronts.COSTS}
    drawings = [*plots["bytes"], *(timed(plot, data.shared) for plot in plots["time"])]
    absent = f"no two cells with a perplexity, one of them {BASELINE}, share strategy, world size and link"
    return {"plots": drawings} if drawings else absent


def time_to_target(data: Data) -> Content:
    """Time to the experiment's targets."""
    if not data.times:
        return "the experiment has no target (`targets:` in the configuration)"
    return {
        "tables": [Table.of("targets", "Time to target", records(data.times), TARGETS)],
        "plots": [timed(plot, data.shared) for plot in fronts.time_to_loss(data.times, data.looks)],
    }


def over_ranks(data: Data) -> Content:
    """What methods cost in perplexity, over world sizes."""
    costs: defaultdict[str, defaultdict[str, dict[int, Estimate]]] = defaultdict(lambda: defaultdict(dict))
    for group in on_one_link(data.groups):
        for label in dict.fromkeys(row.compressor for row in group.rows(data.ok)):
            quality = data.judged[group.strategy, group.world_size, label, group.link]
            if quality.worse and label != quality.reference:
                costs[group.strategy][label][group.world_size] = quality.difference
    of_several = {
        strategy: {label: of_label for label, of_label in labels.items() if len(of_label) > 1}
        for strategy, labels in costs.items()
    }
    plots = [
        partial(curves.draw_ranks, strategy, labels, data.looks) for strategy, labels in of_several.items() if labels
    ]
    absent = "no compressor has a perplexity at two world sizes, and that of its optimizer in every step"
    return {"plots": plots} if plots else absent


def loss(data: Data) -> Content:
    """Training loss over steps and seconds, and validation loss over steps."""
    lines, validated = data.lines("loss"), data.lines("val_loss")
    if not lines:
        return "no run has a steps.parquet" if data.ok else NO_RESULT
    with_times = {
        group: {label: line for label, line in of_group.items() if not np.isnan(line.seconds).any()}
        for group, of_group in lines.items()
    }
    over_seconds = curves.plots(curves.LOSS_SECONDS, with_times, data.looks)
    return {
        "plots": [
            *over_steps(data, curves.LOSS_STEPS, lines),
            *(timed(plot, data.shared) for plot in over_seconds),
            *over_steps(data, curves.VALIDATION, validated),
        ]
    }


def over_steps(data: Data, kind: curves.Kind, lines: Mapping[Group, curves.Lines]) -> Iterator[Drawing]:
    """Figures over steps, which do not depend on the link, on one link; a point alone is no curve."""
    several = {
        group: {label: line for label, line in lines[group].items() if len(line.steps) > 1}
        for group in on_one_link(lines)
    }
    return curves.plots(kind, dict(sorted(several.items(), key=lambda item: -len(item[1]))), data.looks)


def step_times(data: Data) -> Content:
    """Where a step's time goes."""
    parts = {row.run_name: of_run for row in data.ok if (of_run := _step_parts(data, row))}
    if not parts:
        return "no run has a profile.json with profiled steps" if data.ok else NO_RESULT
    plots, lines = [], []
    for group in data.groups:
        rows = [row for row in group.rows(data.ok) if row.run_name in parts]
        if not rows:
            continue
        times = pd.DataFrame([parts[row.run_name] for row in rows])
        means = times.groupby([row.compressor for row in rows]).mean()
        means = means.loc[means.sum(axis=1).sort_values(kind="stable").index]
        plots.append(timed(partial(speed.draw_step, group, means), data.shared))
        of_labels = means.to_dict("index").items()
        lines += [{**group._asdict(), "compressor": label, **values} for label, values in of_labels]
    columns = [Column(f"{part}, ms", part, "{:,.2f}") for part in speed.STEP_PARTS]
    made = Table.of("step-time", "Milliseconds of the mean step", lines, [*NAMES, *columns])
    return {"plots": plots, "tables": [made]}


def _step_parts(data: Data, row: Result) -> dict[str, float] | None:
    """The parts of a run's mean step, if it has profiled steps."""
    path = data.results_dir / "runs" / row.run_name / "profile.json"
    if not path.is_file():
        return None
    try:
        profile = read_json(path)
        return speed.step_parts(profile) if profile["steps"] else None  # none if it ended before a profiled step
    except (BadInput, KeyError, TypeError) as error:
        data.notes.append(f"{path} is unusable ({error!r}).")
        return None


def scaling(data: Data) -> Content:
    """Scaling over world sizes."""
    if data.cells is None:
        return NO_RESULT
    plots = [timed(plot, data.shared) for plot in speed.scaling(data.runs, data.looks)]
    if not plots:
        return "no strategy ran at two world sizes"
    fields = [*GROUP, "compressor", "scaling_efficiency"]
    frame = pd.DataFrame([[getattr(row, name) for name in fields] for row in data.ok], columns=fields)
    means = frame.dropna().groupby(fields[:-1], sort=False).mean().reset_index()
    if means.empty:
        return {"plots": plots}
    means["efficiency_percent"] = 100 * means["scaling_efficiency"].astype(float)
    lines = means.to_dict("records")
    made = Table.of("scaling", "Tokens/s per rank, in percent of one rank's", lines, [*NAMES, EFFICIENCY])
    return {"plots": plots, "tables": [made]}


def winners(data: Data) -> Content:
    """The map of the fastest compressors, and the numbers in its caption."""
    path = data.results_dir / "results.jsonl"
    try:
        chosen = usable([row for row in data.rows if unpredictable(row) is None], path)  # without islands
    except BadInput as error:
        return str(error).removeprefix(f"{path}: ").removesuffix(".")
    model = Model(tuple(map(measurement_of, chosen)))
    errors = [abs(prediction.errors[0]) for prediction in leave_one_link_out(model.measurements)]
    off = f" Predicted from the other links, the median step is {100 * median(errors):.0f} % off." if errors else ""
    plots = []
    for strategy in dict.fromkeys(measurement.strategy for measurement in model.measurements):
        labels = [label for key, label in model.by_label if key == strategy]
        worse = data.percent_worse(row for row in chosen if row.strategy == strategy)
        within = [label for label in labels if worse.get(label, float("inf")) <= 1]
        plots.append(partial(speed.draw_winners, model, strategy, labels, "any perplexity", data.looks))
        if len(within) > 1:
            plots.append(partial(speed.draw_winners, model, strategy, within, "perplexity within 1 %", data.looks))
    values = {"cells": len(chosen), "world": chosen[0].world_size, "latency": speed.LATENCY * 1e6, "off": off}
    return {"plots": [timed(plot, data.shared) for plot in plots], "values": values}


def gradient_error(data: Data) -> Content:
    """Gradient error and residual norm."""
    errors, residuals = data.lines("grad_rel_error"), data.lines("residual_norm")
    if not errors and not residuals:
        return "no run sampled its gradients (`eval_every`)" if data.ok else NO_RESULT
    plots = [*over_steps(data, curves.GRADIENT_ERROR, errors), *over_steps(data, curves.RESIDUAL, residuals)]
    if not plots:
        return "no run sampled its gradients more than once (`eval_every`)"
    lacking = "gradient error was sampled" if not errors else "run has a residual: none uses error feedback"
    return {"plots": plots, "notes": [] if errors and residuals else [f"No {lacking}."]}


def stores(data: Data) -> Content:
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
    if not lines:
        return "no gradients were collected (`gradients:` in the configuration)"
    fails = [line["result"] == "FAILED" for line in lines]
    return {"tables": [replace(Table.of("stores", "Checks of each store", lines, STORES), fails=fails)]}


def environments(data: Data) -> Content:
    """The environment of every rank."""
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
    if not by_digest:
        return "no run left environment/rank<R>.json"
    first, *others = by_digest.values()
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
    return {
        "properties": [(name, _text(first[name])) for name in first if name in shared and _text(first[name])],
        "tables": [Table.of("environment", "Environments", lines, shown)],
    }


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
    name, other_name = data.results_dir.as_posix(), other.results_dir.as_posix()
    pairs = common(data.ok, other.ok)
    if not pairs:
        raise BadInput(
            f"{name} and {other_name} share no run with a result: none has the same strategy, compressor, "
            "world size, link and seed in both."
        )
    cells = {quantity: differences(pairs, quantity) for quantity in QUANTITIES}
    content: dict[str, Any] = {
        "tables": [table(quantity, of) for quantity, of in cells.items() if of],
        "notes": [
            f"{len(pairs)} runs are in both, {len(data.ok) - len(pairs)} in {name} only, "
            f"{len(other.ok) - len(pairs)} in {other_name} only.",
            *unlike(pairs),
            *(note for quantity, of in cells.items() for note in over_cells(quantity, of)),
        ],
    }
    return section("compare", content | {"values": {"name": name, "other": other_name}})


SECTIONS: dict[str, Callable[[Data], Content]] = {  # in order; those of a question are together
    "headline": headline,
    "pareto": pareto,
    "targets": time_to_target,
    "ranks": over_ranks,
    "winners": winners,
    "loss": loss,
    "gradient-error": gradient_error,
    "step-time": step_times,
    "scaling": scaling,
    "cells": all_cells,
    "validity": validity,
    "stores": stores,
    "environment": environments,
}


def sections(data: Data) -> Iterator[Section]:
    """Yield all sections."""
    return (section(key, content(data)) for key, content in SECTIONS.items())
