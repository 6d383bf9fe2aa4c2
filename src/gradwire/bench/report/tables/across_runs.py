"""The rows of an experiment, with the fields that depend on other runs: borrowed perplexities, and times to targets.

**Perplexities of another experiment** are for runs that are too short to have their own (`quality`).

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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.base.errors import BadInput
from gradwire.base.units import UNSHAPED
from gradwire.bench import steps as steps_file
from gradwire.bench.config import BASELINE, Run, Targets
from gradwire.bench.report.rows.record import OWN_QUALITY, Result, without_measurements
from gradwire.bench.report.rows.runs import EXPECTED, SHARED, asked_for, result, runs_on_disk
from gradwire.bench.report.tables.quality import PerplexityReference, perplexity_reference

MARGIN = 1.05  # the target of ``time_to_target_ppl_s``, times the baseline's final perplexity
ROUNDING = 1e-5  # nats: `gradwire perplexity` and a run's own last evaluation round differently


def joined(
    results_dir: Path, experiment: Path | None = None, quality_from: Path | None = None
) -> tuple[list[Result], PerplexityReference, list[str]]:
    """Return a row for every run; missing perplexities are taken from others.

    Args:
        results_dir: The experiment's folder.
        experiment: As for `collect`.
        quality_from: The results file of the other experiment; by default the one named in the list of runs, if any.

    Returns:
        The rows, the runs whose perplexities count (of this or the other experiment), and complaints.

    Raises:
        BadInput: As `collect`; if a results file cannot be read; if the list names several.
    """
    results = collect(results_dir, experiment)
    requests = asked_for(results_dir, experiment).values()
    notes = [SHARED] if any(request.shared for request in requests) else []
    named = {request.quality_from for request in requests} - {None}
    if len(named) > 1 and quality_from is None:
        raise BadInput(f"the runs of {results_dir} name several files for quality_from: {', '.join(map(str, named))}.")
    path = quality_from or next((Path(str(name)) for name in named), None)
    if path is None:  # runs for times only have the perplexities of the others
        reference = PerplexityReference.of(str(results_dir / "results.jsonl"), results)
        return with_quality(results, reference)[0], reference, notes
    reference, complaints = perplexity_reference(path)
    results, unmatched = with_quality(results, reference)
    return results, reference, [*notes, *complaints, *unmatched]


def collect(results_dir: Path, experiment: Path | None = None) -> list[Result]:
    """Return a row for every run, sorted by name.

    Args:
        results_dir: The experiment's folder.
        experiment: The list of requested runs; default: ``results_dir/expected.json``. Without a list, all runs on disk
            count. Runs on disk that are not in the list may have other settings: they are left out, with a note on
            standard error.

    Raises:
        BadInput: If there is nothing to summarize, or the list is unusable.
    """
    asked = asked_for(results_dir, experiment)
    if not asked:
        raise BadInput(f"{results_dir} holds no run (runs/<strategy>/<compressor>/ws<W>/<link>/seed<S>) to summarize.")
    if strangers := sorted(run.path for run in runs_on_disk(results_dir) if run not in asked):
        listed = experiment or results_dir / EXPECTED
        print(f"gradwire summarize: not in {listed}, left out: {', '.join(strangers)}", file=sys.stderr)
    folder = results_dir / "runs"
    results = [
        without_measurements(run, "skipped", request.excluded) if request.excluded else result(folder / run.path, run)
        for run, request in sorted(asked.items())
    ]
    curves = read_curves(results, results_dir)
    timed = against_time(curves, {row.run for row in results if row.status == "ok"})
    efficiencies = scaling_efficiencies(results)
    results = [
        row.model_copy(update=timed.get(row.run, {}) | {"scaling_efficiency": efficiencies.get(row.run)})
        for row in results
    ]

    def reached(row: Result) -> dict[str, Any]:
        targets, curve = asked[row.run].targets, curves.get(row.run)
        if targets is None or curve is None:
            return {}
        return to_targets(row, targets, results, curve, folder / row.run_name / "steps.parquet")

    return [row.model_copy(update=reached(row)) for row in results]


def scaling_efficiencies(results: Sequence[Result]) -> dict[Run, float]:
    """Tokens/s per rank over one rank's on like hardware and with the same seed: of the same label, or the baseline."""
    alone: defaultdict[tuple[str, str], dict[Any, float]] = defaultdict(dict)
    for row in results:
        if (row.status, row.world_size, row.link) == ("ok", 1, UNSHAPED) and row.tokens_per_s:
            alone[row.strategy, row.compressor][row.hardware, row.seed] = row.tokens_per_s
    efficiencies = {}
    for row in results:
        label = row.compressor if (row.strategy, row.compressor) in alone else BASELINE
        rate = alone.get((row.strategy, label), {}).get((row.hardware, row.seed))
        if row.status == "ok" and row.world_size > 1 and row.tokens_per_s and rate:
            efficiencies[row.run] = row.tokens_per_s / row.world_size / rate
    return efficiencies


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
        result
        for result in results
        if (result.compressor, result.world_size, result.seed) == (label, row.world_size, row.seed)
        if result.status == "ok" and result.val_loss is not None
    ]
    best = max(known, key=lambda result: (result.strategy == row.strategy, result.link == row.link), default=None)
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
    without that baseline.

    Args:
        row: A run that was timed.
        source: The run with its perplexity.
        results: All rows of the row's experiment.
    """
    steps = source.steps_to_target
    if steps is None:
        return {}
    baseline = row.run._replace(compressor=BASELINE)
    dense = next((result.step_time_ms_mean for result in results if result.run == baseline), None)
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
        run: The run; it gives how many steps are dense.
        step: The time of a step after the dense ones.
        dense_step: The time of a dense step: the baseline's.
    """
    dense = min(steps, (run.compress_config or {}).get("dense_steps", 0))
    if step is None or (dense and dense_step is None):
        return None
    return dense * (dense_step or 0.0) + (steps - dense) * step
