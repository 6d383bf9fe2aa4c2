"""Quality against time: time to the baseline's quality, and quality at the fastest run's end.

A run's time is the sum of its step times, each the slowest rank's, without evaluations, checkpoints and what the first
step compiles. A run that never reaches the target is censored, not dropped: its time is null and ``target_reached`` is
false.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.bench.config import BASELINE, Run
from gradwire.bench.trace import steps

TARGET = 1.05  # of the baseline's final perplexity


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

    @property
    def target(self) -> float | None:
        """The target loss of other runs if this is the baseline; None without an evaluation."""
        return float(self.losses[-1]) + math.log(TARGET) if len(self.losses) else None

    def reaches(self, loss: float) -> int | None:
        """Index of the first evaluation with at most this loss, or None."""
        good = np.flatnonzero(self.losses <= loss)
        return int(good[0]) if len(good) else None

    def ppl_at(self, seconds: float) -> float | None:
        """Perplexity of the last evaluation within ``seconds``; None if there is none."""
        done = int(np.searchsorted(self.seconds, seconds, side="right"))
        return math.exp(self.losses[done - 1]) if done else None


def read(path: Path) -> Curve:
    """Read the curve from a ``steps.parquet``.

    Raises:
        BadInput: If the file is invalid.
    """
    table = steps.read(path, ["step", "step_ms", "val_loss"])
    step, ms, loss = (table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names)
    seconds = steps.durations(step, ms).cumsum() / 1000
    evaluated, first = np.unique(step[~np.isnan(loss)], return_index=True)
    return Curve(
        evaluated + 1, seconds[evaluated], loss[~np.isnan(loss)][first], float(seconds[-1]) if len(seconds) else 0.0
    )


def bytes_sent(path: Path, count: int) -> int | None:
    """Bytes that all ranks' reducers sent in the first ``count`` steps of a ``steps.parquet``; None without a reducer.

    Raises:
        BadInput: If the file is invalid.
    """
    table = steps.read(path, ["step", "bytes_sent"])
    step, sent = (table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names)
    chosen = sent[step < count]
    return None if np.isnan(chosen).any() else int(chosen.sum())


def against_time(curves: Mapping[Run, Curve], finished: set[Run]) -> dict[Run, dict[str, Any]]:
    """The time-to-target and fixed-time fields of every run.

    The target is `TARGET` times the final perplexity of the baseline with the same strategy, world size, link and seed.
    The fixed time is that of the fastest finished run with the same world size, link and seed, of any strategy.

    Args:
        curves: The experiment's runs.
        finished: Runs that did not diverge; only these serve as baselines or determine fixed times.
    """
    fixed: dict[tuple[int, str, int], float] = {}
    for run in finished & curves.keys():
        same = run.world_size, run.link, run.seed
        fixed[same] = min(fixed.get(same, math.inf), curves[run].total_s)
    found = {}
    for run, curve in curves.items():
        baseline = run._replace(compressor=BASELINE)
        target = curves[baseline].target if baseline in finished & curves.keys() else None
        at = None if target is None else curve.reaches(target)
        seconds = fixed.get((run.world_size, run.link, run.seed))
        found[run] = {
            "target_reached": None if target is None else at is not None,
            "time_to_target_ppl_s": None if at is None else float(curve.seconds[at]),
            "steps_to_target_ppl": None if at is None else int(curve.steps[at]),
            "ppl_at_fixed_time": None if seconds is None or run not in finished else curve.ppl_at(seconds),
        }
    return found
