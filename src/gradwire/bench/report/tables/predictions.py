"""Predictions as tables: the fastest label at a world size and bandwidth, crossovers, the fit, and its errors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.base.units import rate_text
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import BF16, Result
from gradwire.bench.report.tables.checks import machines
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.table import MISSING, markdown, number
from gradwire.bench.report.tables.time_to_loss import seconds_to
from gradwire.bench.statistics.cost_model import (
    LeftOut,
    Model,
    Place,
    crossover,
    leave_one_link_out,
    peak_memory,
)
from gradwire.comm.topology import link_rate, sharded_islands

BASELINES = (BASELINE, BF16)
LIMITS = (1, 5, 20)  # percent above the perplexity of the same optimizer in every step
TARGET = "ppl "  # what the goal of a target begins with
RESAMPLES = 200

DEFINITIONS = """\
Each step uses the fastest way of the measured cells; `95 %` is the interval of a bootstrap of the fit's residuals;
`× none`, `× bf16-native`: how many times shorter than theirs.
`N/(1+α)`: the speed-up over one rank, where α is the time of a step outside computation over that of computation;
none where the step is shorter than the measured computation, which is not that of this step then.
`ppl`: measured perplexity above that of the same optimizer in every step, paired by seed (`none` for AdamW); winners
are named within 1, 5 and 20 % of it, and for each target perplexity of the measured runs the label that reaches it
soonest, in as many steps as they took; labels with
`dense_rounds` have no such time, as their steps differ. A crossover is the
bandwidth below which a label's step is shorter, with such an interval. Assumed:
hosts as fast as the measured ones, equal computation on every rank, and one call per collective and step, or per round
of local updates, with `--latency` for each of its messages. With `--islands`, `--bandwidth` is that of each island's
cable, and `--latency` that of messages between islands. A ring passes every cable once; what an island's ranks send
together shares one."""


@dataclass(frozen=True)
class Qualities:
    """The known quality of a strategy's labels.

    Args:
        worse: Percent of perplexity above the same optimizer in every step, by label.
        runs: The runs with targets, by target and label, one for each seed.
    """

    worse: Mapping[str, float]
    runs: Mapping[str, Mapping[str, Sequence[Result]]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Result], results: Results) -> Qualities:
        """The qualities of a strategy's rows, with the targets of all seeds of the runs whose perplexities count."""
        runs: defaultdict[str, dict[str, Sequence[Result]]] = defaultdict(dict)
        for row in {row.compressor: row for row in rows}.values():
            try:
                seeds = list(results.quality.seeds(row).values())
            except BadInput:
                continue  # without a perplexity
            for target in dict.fromkeys(name for run in seeds for name in run.steps_to_target or {}):
                runs[target][row.compressor] = seeds
        return cls(results.percent_worse(rows), runs)

    def costs(self, steps: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """By goal, what each label costs that can reach it: its step, or its time to a target.

        Args:
            steps: Seconds of a step, by label.
        """
        goals = {
            f"within {limit} %": {
                label: step for label, step in steps.items() if self.worse.get(label, math.inf) <= limit
            }
            for limit in LIMITS
        }
        for target, by_label in sorted(self.runs.items()):
            times = {
                label: seconds_to(target, runs, steps[label], steps.get(BASELINE))
                for label, runs in by_label.items()
                if label in steps
            }
            goals[TARGET + target] = {label: time for label, time in times.items() if math.isfinite(time)}
        return {goal: costs for goal, costs in goals.items() if costs}


def predictions(
    model: Model,
    results: Results,
    chosen: Sequence[Result],
    place: Place,
    memory: bool,
) -> str:
    """Format all predictions and their errors as Markdown.

    Args:
        model: The fitted model.
        results: The experiment.
        chosen: The rows that the model is fitted to.
        place: What to predict for.
        memory: Whether to predict each rank's peak memory as well.
    """
    parts = [*machines(chosen), DEFINITIONS]
    resampled = list(model.resampled(RESAMPLES))
    for strategy in dict.fromkeys(measurement.strategy for measurement in model.measurements):
        finished = [row for row in results.ok if row.strategy == strategy]
        quality = Qualities.of([row for row in chosen if row.strategy == strategy], results)
        parts += steps([model, *resampled], strategy, finished, quality, place, memory)
        parts += crossovers([model, *resampled], strategy, place)
    return "\n\n".join([*parts, *fit(model), *errors(leave_one_link_out(model.measurements), results.rows)])


def records(model: Model, place: Place) -> list[dict[str, Any]]:
    """The predicted step of every cell, for JSON; times are in milliseconds."""
    return [
        {
            "strategy": strategy,
            "compressor": label,
            "way": algorithm,
            "step_ms": 1e3 * step,
            "comm_ms": 1e3 * communication,
        }
        for (strategy, label) in model.by_label
        for algorithm, step, communication in [model.predict((strategy, label), *place)]
    ]


def steps(
    models: Sequence[Model], strategy: str, rows: Sequence[Result], quality: Qualities, place: Place, memory: bool
) -> list[str]:
    """The heading, the winners and the table of predicted steps of a strategy, fastest first.

    Args:
        models: The fitted model, then resampled ones, of which a step has its range.
        strategy: The strategy.
        rows: Its runs with a result.
        quality: What is known of its labels' quality.
        place: What to predict for.
        memory: Whether to predict each rank's peak memory as well.
    """
    keys = {label: (strategy, label) for of, label in models[0].by_label if of == strategy}
    predicted = {label: models[0].predict(key, *place) for label, key in keys.items()}
    compute = compute_seconds(rows)
    ordered = sorted(predicted, key=lambda label: predicted[label].step)
    lines = []
    for label in ordered:
        algorithm, step, communication = predicted[label]
        gains = [f"{predicted[base].step / step:.3f}" if base in predicted else MISSING for base in BASELINES]
        _, speed_up = scaling(place.world, compute, step)
        worse = number(quality.worse.get(label), "{:+.1f} %")
        low, high = (1e3 * end for end in ends(model.predict(keys[label], *place).step for model in models[1:]))
        ranged = [f"{1e3 * step:,.1f}", f"[{low:,.1f}, {high:,.1f}]", f"{1e3 * communication:,.1f}"]
        line = [label, algorithm, *ranged, *gains, speed_up, worse]
        lines.append([*line, memory_text(rows, label, place)] if memory else line)
    winners = [f"Fastest: `{ordered[0]}`"]  # of any perplexity
    for goal, costs in quality.costs({label: predicted[label].step for label in ordered}).items():
        first = min(costs, key=costs.__getitem__)
        winners.append(f"{goal}: `{first}`" + f" in {costs[first]:,.0f} s" * goal.startswith(TARGET))
    against = [f"× {base}" for base in BASELINES]
    headers = ["compressor", "way", "step ms", "95 %", "comm ms", *against, "N/(1+α)", "ppl", *["GB"] * memory]
    return [f"## {strategy}", "; ".join(winners) + ".", markdown(lines, headers, left=(0, 1))]


def crossovers(models: Sequence[Model], strategy: str, place: Place) -> list[str]:
    """The table of crossover bandwidths.

    Args:
        models: The fitted model, then resampled ones.
        strategy: The strategy.
        place: What to predict for.
    """
    labels = [label for key, label in models[0].by_label if key == strategy]
    fastest = [
        {label: model.fastest((strategy, label), place.world, place.latency, place.islands) for label in labels}
        for model in models
    ]
    bases = [base for base in BASELINES if base in labels]
    lines = []
    for label in labels:
        line = [label]
        for base in bases:
            if label == base:
                line += [MISSING, MISSING]
                continue
            rate, *drawn = (crossover(steps[label], steps[base]) for steps in fastest)
            line += [crossover_text(rate), interval_text(*ends(drawn))]
        lines += [line] if label != BASELINE else []
    headers = [header for base in bases for header in (f"shorter than {base} below", "95 %")]
    return [markdown(lines, ["compressor", *headers])] if lines else []


def ends(values: Iterable[float]) -> tuple[float, float]:
    """The ends of the middle 95 % of resampled values."""
    drawn = sorted(values)
    return drawn[int(0.025 * len(drawn))], drawn[math.ceil(0.975 * len(drawn)) - 1]


def crossover_text(rate: float) -> str:
    """A crossover bandwidth in words, also if there is none."""
    return "never" if rate == 0 else "always" if math.isinf(rate) else rate_text(rate)


def interval_text(low: float, high: float) -> str:
    """The interval of a crossover in words."""
    ends = crossover_text(low), crossover_text(high)
    return ends[0] if ends[0] == ends[1] else f"[{ends[0]}, {ends[1]}]"


def fit(model: Model) -> list[str]:
    """Tables of the fitted parameters."""
    fitted = model.fit
    alphas = [[strategy, op, f"{1e3 * seconds:.2f}"] for (strategy, op), seconds in fitted.alpha.items()]
    hosts = [[op, rate_text(8 / seconds), f"{fitted.factor[op]:.3f}"] for op, seconds in fitted.host.items()]
    return [
        "## The fit",
        markdown(alphas, ["strategy", "collective", "α ms per step"], left=(0, 1)),
        markdown(hosts, ["collective", "host", "backend's factor"]),
    ]


def errors(left_out: Sequence[LeftOut], rows: Sequence[Result]) -> list[str]:
    """Errors of predictions from the other links, and each measured α."""
    lines = []
    for prediction in left_out:
        cell = prediction.measurement
        compute = compute_seconds([row for row in rows if row.strategy == cell.strategy])
        pairs = (cell.step, prediction.step), (cell.communication or None, prediction.communication)  # None: unmeasured
        line = [cell.strategy, cell.label, cell.link]
        for times, error in zip(pairs, prediction.errors, strict=True):
            line += [number(None if time is None else 1e3 * time, "{:,.1f}") for time in times]
            line.append(number(100 * error, "{:+.0f} %"))
        lines.append([*line, *scaling(cell.world, compute, cell.step)])
    step, communication = (_median(abs(prediction.errors[i]) for prediction in left_out) for i in (0, 1))
    headers = ["strategy", "compressor", "link", "step ms", "predicted", "off", "comm ms", "predicted", "off"]
    return [
        "## Each link predicted from the others",
        f"Median relative error: {100 * step:.1f} % of the step, {100 * communication:.1f} % of its communication.",
        markdown(lines, [*headers, "α", "N/(1+α)"], left=(0, 1, 2)),
    ]


def _median(values: Iterable[float]) -> float:
    """The median of what is not NaN, which is not measured."""
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def compute_seconds(rows: Iterable[Result]) -> float | None:
    """Seconds of computation in a step: the step of `none` at W = 1, else its computation on the fastest link.

    A profiled step is longer than others, so its computation counts as a share of it.
    """
    baseline = [row for row in rows if row.compressor == BASELINE and row.status == "ok"]
    alone = [row.step_time_ms_p50 for row in baseline if row.world_size == 1 and row.step_time_ms_p50 is not None]
    fastest = max((link_rate(row.link) for row in baseline), default=math.inf)
    profiled = [computation for row in baseline if link_rate(row.link) == fastest and (computation := computed(row))]
    known = alone or profiled
    return fmean(known) / 1e3 if known else None


def computed(row: Result) -> float | None:
    """Milliseconds of computation in a typical step, by its share of the profiled steps; None if it is unknown."""
    if not (row.comm_time_ms_total and row.comm_ratio and row.measured_steps):
        return None
    profiled = row.comm_time_ms_total / row.measured_steps / row.comm_ratio
    return (row.compute_time_ms or math.nan) / profiled * (row.step_time_ms_p50 or math.nan)


def scaling(world: int, compute: float | None, step: float) -> tuple[str, str]:
    """α and N/(1+α) of a step; neither if its computation is unknown, or longer than the step."""
    if compute is None or not compute <= step:
        return MISSING, MISSING
    return f"{step / compute - 1:.2f}", f"{world * compute / step:,.2f}"


def memory_text(rows: Iterable[Result], label: str, place: Place) -> str:
    """Predicted peak memory of a rank in GB; with hsdp, an island holds the model once."""
    measured = [row for row in rows if row.compressor == label and row.world_size > 1 and row.mem_peak_alloc_gb]
    if not measured:
        return MISSING
    row = max(measured, key=lambda row: row.mem_peak_alloc_gb or 0)
    before = row.world_size // sharded_islands(row.strategy, row.islands)
    after = place.world // sharded_islands(row.strategy, place.islands.number)
    in_shards = (row.parameters or 0) if row.sharded else 0
    peak, outer = 1e9 * (row.mem_peak_alloc_gb or 0), 1e9 * (row.mem_outer_gb or 0)
    return f"{peak_memory(peak, in_shards, before, after, outer) / 1e9:.3f}"
