"""The verb ``predict``: which compressor wins at a world size, bandwidth and latency, from cells measured on links.

`bench.statistics.cost_model` is fitted to the rows of ``results.jsonl``, and tested by predicting each link from the
others.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from gradwire.base.errors import BadInput
from gradwire.base.flags import RANKS
from gradwire.base.units import UNSHAPED, bits_per_second, rate_text, seconds
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.choices import TARGET, Choice, Qualities, choices, qualities
from gradwire.bench.report.rows.measurements import measurement_of, unmeasurable, usable
from gradwire.bench.report.rows.notes import machines
from gradwire.bench.report.rows.quality import PerplexityReference, perplexity_reference
from gradwire.bench.report.rows.record import BF16, Result
from gradwire.bench.report.rows.results_file import read_results
from gradwire.bench.report.rows.traffic import sharded
from gradwire.bench.report.tables.markdown import MISSING, number, table
from gradwire.bench.statistics.seeds import percents
from gradwire.comm.topology import check_islands, sharded_islands

if TYPE_CHECKING:
    from gradwire.bench.statistics.cost_model import Islands, LeftOut, Model

BASELINES = (BASELINE, BF16)
RESAMPLES = 200
MOST = 4096

DEFINITIONS = """\
Each step uses the fastest way of the measured cells; `× none`, `× bf16-native`: how many times shorter than theirs.
`N/(1+α)`: the speed-up over one rank, where α is the time of a step outside computation over that of computation.
`ppl`: measured perplexity against that of `none`; winners are named within 1, 5 and 20 % of it, and for each target
perplexity of the measured runs the label that reaches it soonest, in as many steps as they took; labels with
`freeze_step` or `dense_rounds` have no such time, as their steps differ. A crossover is the
bandwidth below which a label's step is shorter, with the 95 % interval of a bootstrap of the fit's residuals. Assumed:
hosts as fast as the measured ones, equal computation on every rank, and one call per collective and step, or per round
of local updates, with `--latency` for each of its messages. With `--islands`, `--bandwidth` is that of each island's
cable, and `--latency` that of messages between islands. A ring passes every cable once; what an island's ranks send
together shares one."""


def arguments(parser: ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument(
        "--results_dir", type=Path, default=Path("results/links"), help="a folder with results.jsonl of cells on links"
    )
    parser.add_argument("--world_size", type=RANKS, required=True, metavar="N", help=f"ranks, 2 to {MOST}")
    parser.add_argument(
        "--bandwidth", required=True, metavar="RATE", help="of each rank's link, such as 10gbit, or each island's"
    )
    parser.add_argument("--latency", default="50us", metavar="T", help="of each message, such as 50us")
    parser.add_argument("--islands", type=RANKS, default=1, metavar="N", help="islands of ranks, with a cable each")
    parser.add_argument(
        "--bandwidth_inside", default=UNSHAPED, metavar="RATE", help="of each rank's link inside its island"
    )
    parser.add_argument("--latency_inside", metavar="T", help="of each message inside an island; default: --latency")
    parser.add_argument("--json", action="store_true", help="print the predicted steps as JSON")
    parser.add_argument("--memory", action="store_true", help="predict each rank's peak memory as well")


def main(args: Namespace) -> None:
    """Fit, predict and print."""
    from gradwire.bench.statistics.cost_model import Model, leave_one_link_out

    bandwidth, latency = bits_per_second(args.bandwidth), seconds(args.latency)
    islands = islands_of(args)
    if not 2 <= args.world_size <= MOST:
        raise BadInput(f"--world_size {args.world_size}: a prediction is for 2 to {MOST} ranks.")
    path = args.results_dir / "results.jsonl"
    if not path.is_file():
        raise BadInput(
            f"{path} does not exist; first run an experiment with links: make run CONFIG=configs/links.yaml."
        )
    rows, complaints = read_results(path)
    for complaint in complaints:
        print(f"gradwire predict: {complaint}", file=sys.stderr)
    for reason, count in Counter(unpredictable(row, islands.number) for row in rows).items():
        if reason is not None:
            print(f"gradwire predict: left out {count} rows: {reason}.", file=sys.stderr)
    chosen = usable([row for row in rows if unpredictable(row, islands.number) is None], path)
    model = Model(tuple(measurement_of(row) for row in chosen))
    quality, doubts = quality_of(rows, path)
    for doubt in doubts:
        print(f"gradwire predict: {doubt}", file=sys.stderr)
    if args.json:
        print(json.dumps(records(model, args.world_size, bandwidth, latency, islands), indent=2))
        return
    resampled = list(model.resampled(RESAMPLES))
    parts = [
        f"# W = {args.world_size}, {rate_text(bandwidth)} and {args.latency} per message{islands_text(args)}",
        f"From {len(chosen)} cells of {path} at W = {chosen[0].world_size}.",
        *machines(chosen),
        DEFINITIONS,
    ]
    known = {}
    for strategy in dict.fromkeys(one.strategy for one in model.measurements):
        own = [row for row in rows if row.strategy == strategy and row.status == "ok"]
        measured = [row for row in chosen if row.strategy == strategy]
        known[strategy] = qualities(measured, ppl_percent(measured, quality), quality)
        parts += steps(model, strategy, own, known[strategy], args.world_size, bandwidth, latency, islands, args.memory)
        parts += crossovers(model, resampled, strategy, args.world_size, latency, islands)
    left_out = leave_one_link_out(model.measurements)
    parts += [*law(model), *trial(left_out, rows), *regret(choices(left_out, known))]
    print("\n\n".join(parts))


def islands_of(args: Namespace) -> Islands:
    """The islands that the flags describe.

    Raises:
        BadInput: If they do not divide the ranks, a rate or time is invalid, or there are links inside without islands.
    """
    from gradwire.bench.statistics.cost_model import Islands

    if args.islands == 1:
        if (args.bandwidth_inside, args.latency_inside) != (UNSHAPED, None):
            raise BadInput("--bandwidth_inside and --latency_inside are for links inside islands: add --islands N.")
        return Islands()
    check_islands(args.world_size, args.islands)
    rate = math.inf if args.bandwidth_inside == UNSHAPED else bits_per_second(args.bandwidth_inside)
    return Islands(args.islands, rate, seconds(args.latency_inside or args.latency))


def islands_text(args: Namespace) -> str:
    """What the title says of islands."""
    if args.islands == 1:
        return ""
    inside = "no limit" if args.bandwidth_inside == UNSHAPED else rate_text(bits_per_second(args.bandwidth_inside))
    return f" between {args.islands} islands, {inside} and {args.latency_inside or args.latency} inside"


def unpredictable(row: Result, islands: int = 1) -> str | None:
    """Why a row says nothing of the steps to predict; None if it does."""
    if row.strategy == "hsdp" and islands == 1:
        return "hsdp has islands: add --islands N"
    return unmeasurable(row)


def records(model: Model, world: int, bandwidth: float, latency: float, islands: Islands) -> list[dict[str, Any]]:
    """The predicted step of every cell, as JSON has it; times are in milliseconds."""
    found = {run: model.predict(run, world, bandwidth, latency, islands) for run in model.by_label}
    return [
        {"strategy": strategy, "compressor": label, "way": way, "step_ms": 1e3 * step, "comm_ms": 1e3 * communication}
        for (strategy, label), (way, step, communication) in found.items()
    ]


def steps(
    model: Model,
    strategy: str,
    rows: Sequence[Result],
    quality: Qualities,
    world: int,
    bandwidth: float,
    latency: float,
    islands: Islands,
    memory: bool,
) -> list[str]:
    """The heading, the winners and the table of predicted steps of a strategy, fastest first."""
    labels = [label for own, label in model.by_label if own == strategy]
    found = {label: model.predict((strategy, label), world, bandwidth, latency, islands) for label in labels}
    compute = compute_seconds(rows)
    ordered = sorted(labels, key=lambda label: found[label].step)
    lines = []
    for label in ordered:
        way, step, communication = found[label]
        gains = [f"{found[base].step / step:.3f}" if base in found else MISSING for base in BASELINES]
        speed_up = MISSING if compute is None else f"{world * compute / step:,.2f}"
        worse = number(quality.worse.get(label), "{:+.1f} %")
        line = [label, way, f"{1e3 * step:,.1f}", f"{1e3 * communication:,.1f}", *gains, speed_up, worse]
        lines.append([*line, memory_text(rows, label, world, islands.number)] if memory else line)
    winners = [f"Fastest: `{ordered[0]}`"]  # of any perplexity
    for goal, costs in quality.costs({label: found[label].step for label in ordered}).items():
        first = min(costs, key=costs.__getitem__)
        winners.append(f"{goal}: `{first}`" + f" in {costs[first]:,.0f} s" * goal.startswith(TARGET))
    against = [f"× {base}" for base in BASELINES]
    headers = ["compressor", "way", "step ms", "comm ms", *against, "N/(1+α)", "ppl", *["GB"] * memory]
    return [
        f"## {strategy}",
        "; ".join(winners) + ".",
        table(lines, headers, left=(0, 1)),
    ]


def crossovers(
    model: Model, resampled: Sequence[Model], strategy: str, world: int, latency: float, islands: Islands
) -> list[str]:
    """The table of crossover bandwidths."""
    from gradwire.bench.statistics.cost_model import crossover

    labels = [label for own, label in model.by_label if own == strategy]
    bases = [base for base in BASELINES if base in labels]
    found, *drawn = (
        {label: one.fastest((strategy, label), world, latency, islands) for label in labels}
        for one in (model, *resampled)
    )
    lines = []
    for label in labels:
        if label == BASELINE:
            continue
        line = [label]
        for base in bases:
            if label == base:
                line += [MISSING, MISSING]
                continue
            rates = sorted(crossover(one[label], one[base]) for one in drawn)
            ends = rates[int(0.025 * len(rates))], rates[math.ceil(0.975 * len(rates)) - 1]
            line += [crossover_text(crossover(found[label], found[base])), interval_text(*ends)]
        lines.append(line)
    headers = [header for base in bases for header in (f"shorter than {base} below", "95 %")]
    return [table(lines, ["compressor", *headers])] if lines else []


def crossover_text(of: float) -> str:
    """A crossover bandwidth in words, also if there is none."""
    return "never" if of == 0 else "always" if math.isinf(of) else rate_text(of)


def interval_text(low: float, high: float) -> str:
    """The interval of a crossover in words."""
    ends = crossover_text(low), crossover_text(high)
    return ends[0] if ends[0] == ends[1] else f"[{ends[0]}, {ends[1]}]"


def law(model: Model) -> list[str]:
    """Tables of the fitted parameters."""
    fit = model.fit
    alphas = [[strategy, op, f"{1e3 * of:.2f}"] for (strategy, op), of in fit.alpha.items()]
    hosts = [[op, rate_text(8 / of), f"{fit.factor[op]:.3f}"] for op, of in fit.host.items()]
    return [
        "## The fit",
        table(alphas, ["strategy", "collective", "α ms per step"], left=(0, 1)),
        table(hosts, ["collective", "host", "backend's factor"]),
    ]


def trial(found: Sequence[LeftOut], rows: Sequence[Result]) -> list[str]:
    """Errors of predictions from the other links, and each measured α."""
    lines = []
    for one in found:
        cell, off = one.measurement, one.errors
        compute = compute_seconds([row for row in rows if row.strategy == cell.strategy])
        times = [cell.step, one.step, cell.communication or None, one.communication]  # None: not measured
        texts = [number(None if of is None else 1e3 * of, "{:,.1f}") for of in times]
        for place, error in zip((2, 5), off, strict=True):
            texts.insert(place, number(100 * error, "{:+.0f} %"))
        alpha = [] if compute is None else [f"{cell.step / compute - 1:.2f}", f"{cell.world * compute / cell.step:.2f}"]
        lines.append([cell.strategy, cell.label, cell.link, *texts, *(alpha or [MISSING] * 2)])
    step, communication = (_median(abs(one.errors[i]) for one in found) for i in (0, 1))
    headers = [
        "strategy",
        "compressor",
        "link",
        "step ms",
        "predicted",
        "off",
        "comm ms",
        "predicted",
        "off",
        "α",
        "N/(1+α)",
    ]
    return [
        "## Each link predicted from the others",
        f"Median relative error: {100 * step:.1f} % of the step, {100 * communication:.1f} % of its communication.",
        table(lines, headers, left=(0, 1, 2)),
    ]


def _median(errors: Iterable[float]) -> float:
    """The median of what is not NaN, which is not measured."""
    known = [error for error in errors if not math.isnan(error)]
    return median(known) if known else math.nan


def regret(found: Sequence[Choice]) -> list[str]:
    """What choosing by predictions costs on links that they did not see; nothing without perplexities."""
    if not found:
        return []
    costs = [one.regret for one in found]
    lines = [[one.strategy, one.link, one.goal, one.chosen, one.best, f"{100 * one.regret:.1f} %"] for one in found]
    return [
        "## What a choice by these predictions costs",
        "Regret: how much longer the chosen label's step, or its time to a target, is than the best one's, "
        "both measured.\n"
        f"Median {100 * median(costs):.1f} %, maximum {100 * max(costs):.1f} %.",
        table(lines, ["strategy", "link", "goal", "chosen", "best", "regret"], left=(0, 1, 2, 3, 4)),
    ]


def compute_seconds(rows: Iterable[Result]) -> float | None:
    """Seconds of computation in a step: the step of `none` at W = 1, else its profiled computation."""
    baseline = [row for row in rows if row.compressor == BASELINE and row.status == "ok"]
    alone = [row.step_time_ms_p50 for row in baseline if row.world_size == 1 and row.step_time_ms_p50 is not None]
    profiled = [row.compute_time_ms for row in baseline if row.compute_time_ms is not None]
    known = alone or profiled
    return fmean(known) / 1e3 if known else None


def quality_of(rows: Sequence[Result], path: Path) -> tuple[PerplexityReference, list[str]]:
    """Return all seeds of the runs that the rows take their perplexities from, and complaints about their file."""
    named = sorted({row.quality_from.partition(": ")[0] for row in rows if row.quality_from})
    if len(named) == 1 and Path(named[0]).is_file():
        return perplexity_reference(Path(named[0]))
    doubts = [f"{name}, the source of perplexities, is missing: {path} has one seed of them" for name in named]
    return PerplexityReference.of(str(path), rows), doubts


def ppl_percent(rows: Sequence[Result], quality: PerplexityReference) -> dict[str, float]:
    """Percent by which each label's mean perplexity is above that of `none`, where both are known."""
    baseline = next(row for row in rows if row.compressor == BASELINE)
    found = {row.compressor: quality.percent_worse(row, baseline) for row in rows if row.compressor != BASELINE}
    return {BASELINE: 0.0} | {label: percents([each])[0].mean for label, each in found.items() if each}


def memory_text(rows: Iterable[Result], label: str, world: int, islands: int) -> str:
    """Predicted peak memory of a rank in GB; with hsdp, an island holds the model once."""
    from gradwire.bench.statistics.peak_memory import peak_memory

    measured = [row for row in rows if row.compressor == label and row.world_size > 1 and row.mem_peak_alloc_gb]
    if not measured:
        return MISSING
    row = max(measured, key=lambda row: row.mem_peak_alloc_gb or 0)
    before, ranks = (
        size // sharded_islands(row.strategy, number)
        for size, number in ((row.world_size, row.islands), (world, islands))
    )
    in_shards = (row.parameters or 0) if sharded(row) else 0
    measured_gb, outer_gb = row.mem_peak_alloc_gb or 0, row.mem_outer_gb or 0
    return f"{peak_memory(1e9 * measured_gb, in_shards, before, ranks, 1e9 * outer_gb) / 1e9:.3f}"
