"""Time to a target: the steps, seconds and gradient bytes until a run's validation perplexity is as low as asked for.

A target is a perplexity, or the final one of another label with the same world size and seed. A run that never reaches
it has null in the record and ∞ in the tables. Times are sums of step times, each the slowest rank's, without
evaluations and what the first step compiles. A run that takes its perplexity from another experiment takes the steps
and bytes from there too; its seconds are those steps times its own mean step time, because steps to a target do not
depend on the link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.bench.config import BASELINE, Targets
from gradwire.bench.report.rows.record import OWN_QUALITY, Result, run_of
from gradwire.bench.statistics import quality

ROUNDING = 1e-5  # nats: `gradwire perplexity` and a run's own last evaluation round differently


def target_losses(targets: Targets, row: Result, results: Sequence[Result]) -> dict[str, float]:
    """The loss of each target of a run, by its name; a label that has no perplexity to compare with is left out."""
    found = {f"{ppl:g}": math.log(ppl) for ppl in targets.ppl}
    for label in [targets.relative_to] if targets.relative_to else []:
        alike = [one for one in results if (one.compressor, one.world_size, one.seed) == _reference(label, row)]
        known = [one for one in alike if one.status == "ok" and one.val_loss is not None]
        best = max(known, key=lambda one: (one.strategy == row.strategy, one.link == row.link), default=None)
        if best is not None and best.val_loss is not None:
            found[label] = best.val_loss + ROUNDING
    return found


def _reference(label: str, row: Result) -> tuple[str, int, int]:
    return label, row.world_size, row.seed


def with_targets(results: Sequence[Result], results_dir: Path, targets: Mapping[Any, Targets | None]) -> list[Result]:
    """The rows with what it took to reach the targets of their runs.

    Args:
        results: All rows of an experiment.
        results_dir: Its folder.
        targets: The targets of each run.
    """
    return [
        row.model_copy(update=_reached(row, asked, results, results_dir))
        if (asked := targets.get(run_of(row))) is not None
        else row
        for row in results
    ]


def _reached(row: Result, targets: Targets, results: Sequence[Result], results_dir: Path) -> dict[str, Any]:
    """The fields of a row; nothing if the run has no curves of its own."""
    path = results_dir / "runs" / row.run_name / "steps.parquet"
    if not (row.quality_from in OWN_QUALITY or row.status == "diverged") or not path.exists():
        return {}
    try:
        curve = quality.read(path)
    except BadInput:
        return {}  # `record.compared` complains
    losses = target_losses(targets, row, results)
    at = {name: curve.reaches(loss) for name, loss in losses.items()}
    steps = {name: None if i is None else int(curve.steps[i]) for name, i in at.items()}
    return {
        "steps_to_target": steps,
        "time_to_target_s": {name: None if i is None else float(curve.seconds[i]) for name, i in at.items()},
        "bytes_to_target": {name: None if n is None else bytes_until(row, path, n) for name, n in steps.items()},
    }


def bytes_until(row: Result, path: Path, steps: int) -> int | None:
    """Gradient bytes over all ranks in the first ``steps`` steps; where the framework reduces, by the closed form."""
    metered = quality.bytes_sent(path, steps)
    if metered is not None or not row.steps or row.bytes_compressed_total is None:
        return metered
    return row.bytes_compressed_total * steps // row.steps


def on_own_link(row: Result, source: Result, results: Iterable[Result]) -> dict[str, Any]:
    """The fields of a row whose perplexity is that of another run: that run's steps, timed by this experiment.

    Dense steps take the mean step time of the baseline on the same link, the others this run's. Seconds are unknown
    without that baseline, and where the other steps do not all cost the same (``freeze_step``, ``dense_rounds``).

    Args:
        row: A run that was timed.
        source: The run with its perplexity.
        results: All rows of the row's experiment.
    """
    steps = source.steps_to_target
    if steps is None:
        return {}
    baseline = run_of(row)._replace(compressor=BASELINE)
    each = next((one.step_time_ms_mean for one in results if run_of(one) == baseline), None)
    seconds = {
        name: None if n is None else duration(n, source, row.step_time_ms_mean, each) for name, n in steps.items()
    }
    known = all(seconds[name] is not None for name, n in steps.items() if n is not None)
    return {
        "steps_to_target": steps,
        "bytes_to_target": source.bytes_to_target,
        "time_to_target_s": {name: None if s is None else s / 1000 for name, s in seconds.items()} if known else None,
    }


def duration(steps: float, run: Result, own: float | None, baseline: float | None) -> float | None:
    """The time of a run's first steps; None if it is unknown.

    Args:
        steps: Their number.
        run: The run; it says how many steps are dense, and whether the later ones all cost the same.
        own: The time of a step after the dense ones.
        baseline: The time of a dense step: the baseline's.
    """
    config = run.compress_config or {}
    dense = min(steps, config.get("dense_steps", 0))
    if own is None or (dense and baseline is None) or {"freeze_step", "dense_rounds"} & config.keys():
        return None
    return dense * (baseline or 0.0) + (steps - dense) * own
