"""Quality of runs: perplexities of another experiment, and the time to a target.

**Perplexities of another experiment** are for runs that are too short to have their own.

Quality does not depend on the link, so a timing cell takes the perplexity of a long run with its label: of its own
strategy if that has one, else of ddp, else of any. The two may differ only in their numbers of steps and of warm-up
steps (``dense_steps``), and in the learning rate; otherwise the cell has no perplexity.

**Time to a target**: the steps, seconds and gradient bytes until a run's validation perplexity is as low as asked for.
A target is a perplexity, or the final one of another label with the same world size and seed. A run that never reaches
it is censored, not dropped: it has null in the record and ∞ in the tables. Times are sums of step times, each the
slowest rank's, without evaluations, checkpoints and what the first step compiles. A run that takes its perplexity from
another experiment takes the steps and bytes from there too; its seconds are those steps times its own mean step time,
because steps to a target do not depend on the link.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gradwire.base.errors import BadInput
from gradwire.bench.config import BASELINE, Run, Targets
from gradwire.bench.report.rows.record import OWN_QUALITY, Result, read_results
from gradwire.bench.statistics.seeds import Estimate, percent_worse, percents
from gradwire.bench.trace import steps as steps_file

PREFERRED = "ddp"  # the strategy whose perplexity others use if they have none
FREE = ("dense_steps", "lr", "beta2")  # options that change no step time after the warm-up
SAME = [
    "compress_config",
    "model",
    "parameters",
    "dataset",
    "max_length",
    "batch_size",
    "precision",
    "optimizer",
    "world_size",
]
MARGIN = 1.05  # the target of ``time_to_target_ppl_s``, times the baseline's final perplexity
ROUNDING = 1e-5  # nats: `gradwire perplexity` and a run's own last evaluation round differently


@dataclass(frozen=True)
class PerplexityReference:
    """Runs with a perplexity.

    Args:
        name: The results file.
        rows: The runs.
    """

    name: str
    rows: tuple[Result, ...]

    @cached_property
    def by_label(self) -> Mapping[str, list[Result]]:
        """The rows of each label."""
        rows: defaultdict[str, list[Result]] = defaultdict(list)
        for row in self.rows:
            rows[row.compressor].append(row)
        return rows

    @classmethod
    def of(cls, name: str, rows: Iterable[Result]) -> Self:
        """Keep the rows with a perplexity that is not another run's."""
        return cls(name, tuple(row for row in rows if row.val_ppl is not None and row.own_quality))

    def seeds(self, row: Result, strategy: str | None = None) -> dict[int, Result]:
        """Return the runs, by seed, whose perplexity counts for the cell of ``row``.

        Args:
            row: A run of the cell.
            strategy: The preferred strategy; by default the row's own.

        Raises:
            BadInput: If there are none, with the reason.
        """
        labelled = self.by_label.get(row.compressor, [])
        if not labelled:
            raise BadInput(f"{self.name} has no perplexity of {row.compressor}")
        alike = [run for run in labelled if not differences(run, row)]
        if not alike:
            differing = ", ".join(differences(labelled[0], row))
            raise BadInput(f"{self.name} has {row.compressor} with another {differing} ({labelled[0].run_name})")
        present = sorted({run.strategy for run in alike})
        wanted = next(name for name in (strategy or row.strategy, PREFERRED, *present) if name in present)
        alike.sort(key=lambda run: run.link == row.link)  # the row's own link is the last, and stays
        return {run.seed: run for run in alike if run.strategy == wanted}

    def compared(self, runs: Mapping[int, Result]) -> Quality:
        """Compare a cell with the same optimizer in every step, of the same strategy and world size, paired by seed.

        `BASELINE` is that cell for its optimizer. For another optimizer it is the one that the framework itself
        reduces, with the most seeds, and of these the best.

        Args:
            runs: The cell's runs, by seed.
        """
        first = next(iter(runs.values()))
        labels = {
            row.compressor: row
            for row in self.rows
            if row.averages
            and (row.inner, row.strategy, row.world_size) == (first.inner, first.strategy, first.world_size)
        }
        ranked = []
        for label, row in labels.items():
            base = self.seeds(row.model_copy(update={"link": first.link}))
            if worse := percent_worse(perplexities(runs), perplexities(base)):
                mean = fmean(perplexities(base).values())
                ranked.append(((label != BASELINE, row.hooked, -len(base), mean), Quality(runs, label, worse)))
        return min(ranked, key=itemgetter(0))[1] if ranked else Quality(runs)


class Quality(NamedTuple):
    """The perplexities of a cell.

    Attributes:
        runs: The runs that they are of, by seed.
        reference: The label that percentages are against: the same optimizer, with every step's gradients averaged as
            they are. Empty if there is none.
        worse: Percent above it, by seed, for the seeds of both.
    """

    runs: Mapping[int, Result] = {}
    reference: str = ""
    worse: Mapping[int, float] = {}

    @property
    def difference(self) -> Estimate:
        """Percent above the reference, the mean over seeds and its spread."""
        return percents([[*self.worse.values()]])[0]


CellKey = tuple[str, int, str, str]  # strategy, world size, label and link


def cell_key(row: Result) -> CellKey:
    """The cell of a run."""
    return row.strategy, row.world_size, row.compressor, row.link


def qualities(rows: Iterable[Result], reference: PerplexityReference) -> dict[CellKey, Quality]:
    """The quality of each cell: that of its runs, or of those whose perplexities count for it.

    A percentage never mixes both: its two runs are of one experiment, with one seed.

    Args:
        rows: The runs with a result.
        reference: The runs whose perplexities count for cells without their own.
    """
    of_cell: defaultdict[CellKey, list[Result]] = defaultdict(list)
    for row in rows:
        of_cell[cell_key(row)].append(row)
    measured = PerplexityReference.of("these runs", (row for cell in of_cell.values() for row in cell))
    return {key: _quality(cell, measured, reference) for key, cell in of_cell.items()}


def _quality(cell: Sequence[Result], measured: PerplexityReference, reference: PerplexityReference) -> Quality:
    if runs := {row.seed: row for row in cell if row.val_ppl is not None and row.own_quality}:
        return measured.compared(runs)
    try:
        return reference.compared(reference.seeds(cell[0]))
    except BadInput:
        return Quality()


def mean_percent_worse(
    rows: Iterable[Result], ok: Sequence[Result], reference: PerplexityReference
) -> dict[str, float]:
    """Percent of perplexity by which each label is above the same optimizer in every step, where it is known.

    The baseline is compared with itself.

    Args:
        rows: Runs of one strategy and world size.
        ok: All runs with a result, these among them.
        reference: The runs whose perplexities count for cells without their own.
    """
    judged = qualities(ok, reference)
    of_labels = {row.compressor: judged[cell_key(row)] for row in rows}
    return {BASELINE: 0.0} | {label: of.difference.mean for label, of in of_labels.items() if of.worse}


def perplexities(runs: Mapping[int, Result]) -> dict[int, float]:
    """The perplexity of each seed."""
    return {seed: run.val_ppl for seed, run in runs.items() if run.val_ppl is not None}


def differences(first: Result, second: Result) -> list[str]:
    """Fields that differ between two runs and must not for their qualities to be equal."""

    def compared(row: Result, field: str) -> Any:
        value = getattr(row, field)
        return {key: of for key, of in value.items() if key not in FREE} if isinstance(value, dict) else value

    return [field for field in SAME if compared(first, field) != compared(second, field)]


def perplexity_reference(path: Path) -> tuple[PerplexityReference, list[str]]:
    """Read the perplexities of a results file; return them with complaints about skipped lines."""
    rows, complaints = read_results(path)
    return PerplexityReference.of(str(path), rows), complaints


def reference_of(rows: Sequence[Result], path: Path) -> tuple[PerplexityReference, list[str]]:
    """Return all seeds of the runs that rows take their perplexities from, and complaints about their file.

    Args:
        rows: The rows of an experiment.
        path: Their file.
    """
    borrowed = [row for row in rows if not row.own_quality and row.quality_from]
    measured = {row.run_name: row.val_ppl for row in rows if row.own_quality}
    sources = {row.run_name: (row.quality_from or "").partition(": ") for row in borrowed}
    if all(measured.get(sources[row.run_name][2]) == row.val_ppl for row in borrowed):  # of the same experiment
        return PerplexityReference.of(str(path), rows), []
    named = sorted({name for name, _, _ in sources.values()})
    if len(named) == 1 and Path(named[0]).is_file():
        return perplexity_reference(Path(named[0]))
    doubts = [f"{name}, the source of perplexities, is missing: {path} has one seed of them" for name in named]
    return PerplexityReference(str(path), tuple(row for row in rows if row.val_ppl is not None)), doubts


def with_quality(results: Sequence[Result], reference: PerplexityReference) -> tuple[list[Result], list[str]]:
    """Fill in missing perplexities by label and seed; return the rows with complaints about those still missing."""
    rows, complaints = [], []
    for row in results:
        if row.status == "ok" and row.val_ppl is None:
            try:
                row = _with_quality(row, reference, results)
            except BadInput as error:
                complaints.append(f"{row.run_name} has no perplexity: {error}")
        rows.append(row)
    return rows, complaints


def _with_quality(row: Result, reference: PerplexityReference, results: Sequence[Result]) -> Result:
    """Fill in the perplexity of the row's own seed, and what it took to reach targets.

    Raises:
        BadInput: If that seed has none.
    """
    seeds = reference.seeds(row)
    if row.seed not in seeds:
        strategy = next(iter(seeds.values())).strategy
        raise BadInput(f"{reference.name} has no seed {row.seed} of {strategy}/{row.compressor}")
    source = seeds[row.seed]
    quality: dict[str, Any] = {"val_loss": source.val_loss, "val_ppl": source.val_ppl}
    quality |= on_link(row, source, results)
    return row.model_copy(update=quality | {"quality_from": f"{reference.name}: {source.run_name}"})


class Curve(NamedTuple):
    """A run's evaluations.

    Attributes:
        steps: Optimizer steps before each evaluation.
        seconds: Time of those steps.
        losses: Mean negative log-likelihood in nats.
        total_s: Time of all steps in seconds.
    """

    steps: NDArray[np.int64]
    seconds: NDArray[np.float64]
    losses: NDArray[np.float64]
    total_s: float

    def reaches(self, loss: float) -> int | None:
        """Index of the first evaluation with at most this loss, or None."""
        good = np.flatnonzero(self.losses <= loss)
        return int(good[0]) if len(good) else None

    def ppl_at(self, seconds: float) -> float | None:
        """Perplexity of the last evaluation within ``seconds``; None if there is none."""
        done = int(np.searchsorted(self.seconds, seconds, side="right"))
        return math.exp(self.losses[done - 1]) if done else None


def read_curve(path: Path) -> Curve:
    """Read the curve from a ``steps.parquet``.

    Raises:
        BadInput: If the file is invalid.
    """
    table = steps_file.read(path, ["step", "step_ms", "val_loss"])
    step, ms, loss = (table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names)
    seconds = steps_file.durations(step, ms).cumsum() / 1000
    known = ~np.isnan(loss)
    evaluated, first = np.unique(step[known], return_index=True)
    total = float(seconds[-1]) if len(seconds) else 0.0
    return Curve(evaluated + 1, seconds[evaluated], loss[known][first], total)


def read_curves(results: Iterable[Result], results_dir: Path) -> dict[Run, Curve]:
    """Read the curves of the runs that have their own perplexity or diverged; complain about unusable files.

    Simulated ranks have no times, and so no curve.
    """
    curves = {}
    for row in results:
        if row.world == "simulated":
            continue
        path = results_dir / "runs" / row.run_name / "steps.parquet"
        if (row.quality_from in OWN_QUALITY or row.status == "diverged") and path.exists():
            try:
                curves[row.run] = read_curve(path)
            except BadInput as error:
                print(f"gradwire summarize: {row.run_name} has no quality over time: {error}", file=sys.stderr)
    return curves


def against_time(curves: Mapping[Run, Curve], finished: set[Run]) -> dict[Run, dict[str, Any]]:
    """The time-to-target and fixed-time fields of every run.

    The target is `MARGIN` times the final perplexity of the baseline with the same strategy, world size, link and seed.
    The fixed time is that of the fastest finished run with the same world size, link and seed, of any strategy.

    Args:
        curves: The experiment's runs.
        finished: Runs that did not diverge; only these serve as baselines or determine fixed times.
    """
    fixed: dict[tuple[int, str, int], float] = {}
    for run in finished & curves.keys():
        same = run.world_size, run.link, run.seed
        fixed[same] = min(fixed.get(same, math.inf), curves[run].total_s)
    fields = {}
    for run, curve in curves.items():
        baseline = run._replace(compressor=BASELINE)
        final = curves[baseline].losses[-1:] if baseline in finished and baseline in curves else ()
        target = next((float(loss) + math.log(MARGIN) for loss in final), None)
        index = None if target is None else curve.reaches(target)
        seconds = fixed.get((run.world_size, run.link, run.seed))
        fields[run] = {
            "target_reached": None if target is None else index is not None,
            "time_to_target_ppl_s": None if index is None else float(curve.seconds[index]),
            "steps_to_target_ppl": None if index is None else int(curve.steps[index]),
            "ppl_at_fixed_time": None if seconds is None or run not in finished else curve.ppl_at(seconds),
        }
    return fields


def target_losses(targets: Targets, row: Result, results: Sequence[Result]) -> dict[str, float]:
    """The loss of each target of a run, by its name; a label that has no perplexity to compare with is left out."""
    losses = {f"{ppl:g}": math.log(ppl) for ppl in targets.ppl}
    label = targets.relative_to
    known = [
        other
        for other in results
        if (other.compressor, other.world_size, other.seed) == (label, row.world_size, row.seed)
        if other.status == "ok" and other.val_loss is not None
    ]
    best = max(known, key=lambda other: (other.strategy == row.strategy, other.link == row.link), default=None)
    if label and best is not None and best.val_loss is not None:
        losses[label] = best.val_loss + ROUNDING
    return losses


def to_targets(row: Result, targets: Targets, results: Sequence[Result], curve: Curve, path: Path) -> dict[str, Any]:
    """Steps, seconds and bytes that a run took to reach its targets, as fields of its row.

    Args:
        row: The run.
        targets: Its targets.
        results: All rows of the experiment.
        curve: The run's evaluations.
        path: Its ``steps.parquet``.
    """
    indices = {name: curve.reaches(loss) for name, loss in target_losses(targets, row, results).items()}
    steps = {name: None if i is None else int(curve.steps[i]) for name, i in indices.items()}
    return {
        "steps_to_target": steps,
        "time_to_target_s": {name: None if i is None else float(curve.seconds[i]) for name, i in indices.items()},
        "bytes_to_target": {name: None if n is None else bytes_until(row, path, n) for name, n in steps.items()},
    }


def bytes_until(row: Result, path: Path, steps: int) -> int | None:
    """Gradient bytes over all ranks in the first ``steps`` steps; where the framework reduces, by the closed form."""
    table = steps_file.read(path, ["step", "bytes_sent"])
    step, sent = (table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names)
    metered = sent[step < steps]
    if not np.isnan(metered).any():
        return int(metered.sum())
    return (
        row.bytes_compressed_total * steps // row.steps
        if row.steps and row.bytes_compressed_total is not None
        else None
    )


def on_link(row: Result, source: Result, results: Iterable[Result]) -> dict[str, Any]:
    """The fields of a row whose perplexity is that of another run: that run's steps, timed by this experiment.

    Dense steps take the mean step time of the baseline on the same link, the others this run's. Seconds are unknown
    without that baseline, and where the other steps do not all cost the same (``dense_rounds``).

    Args:
        row: A run that was timed.
        source: The run with its perplexity.
        results: All rows of the row's experiment.
    """
    steps = source.steps_to_target
    if steps is None:
        return {}
    baseline = row.run._replace(compressor=BASELINE)
    dense = next((other.step_time_ms_mean for other in results if other.run == baseline), None)
    times = {
        name: None if n is None else duration(n, source, row.step_time_ms_mean, dense) for name, n in steps.items()
    }
    known = all(times[name] is not None for name, n in steps.items() if n is not None)
    return {
        "steps_to_target": steps,
        "bytes_to_target": source.bytes_to_target,
        "time_to_target_s": {name: None if ms is None else ms / 1000 for name, ms in times.items()} if known else None,
    }


def duration(steps: float, run: Result, step: float | None, dense_step: float | None) -> float | None:
    """The time of a run's first steps; None if it is unknown.

    Args:
        steps: Their number.
        run: The run; it gives how many steps are dense, and whether the later ones all cost the same.
        step: The time of a step after the dense ones.
        dense_step: The time of a dense step: the baseline's.
    """
    config = run.compress_config or {}
    dense = min(steps, config.get("dense_steps", 0))
    if step is None or (dense and dense_step is None) or "dense_rounds" in config:
        return None
    return dense * (dense_step or 0.0) + (steps - dense) * step
