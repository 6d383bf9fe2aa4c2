"""Which label to choose: the shortest step within a limit of perplexity, or the shortest time to a target perplexity.

The regret of a choice is how much more the chosen label costs than the best one, both as measured: what it costs to
believe the predictions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from gradwire.base.errors import BadInput
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.quality import PerplexityReference
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.rows.targets import duration

if TYPE_CHECKING:
    from gradwire.bench.statistics.cost_model import LeftOut

LIMITS = (1, 5, 20)  # percent above the perplexity of the baseline
TARGET = "ppl "  # what the goal of a target begins with


@dataclass(frozen=True)
class Qualities:
    """What is known of the quality of a strategy's labels.

    Args:
        worse: Percent above the baseline's perplexity, by label.
        runs: The runs with targets, by target and label, one for each seed.
    """

    worse: Mapping[str, float]
    runs: Mapping[str, Mapping[str, Sequence[Result]]] = field(default_factory=dict)

    def costs(self, steps: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """By goal, what each label costs that can reach it: its step, or its time to a target.

        Args:
            steps: Seconds of a step, by label.
        """
        found = {
            f"within {limit} %": {one: step for one, step in steps.items() if self.worse.get(one, math.inf) <= limit}
            for limit in LIMITS
        }
        for target, by_label in sorted(self.runs.items()):
            known = {
                label: seconds_to(target, runs, steps[label], steps.get(BASELINE))
                for label, runs in by_label.items()
                if label in steps
            }
            found[TARGET + target] = {label: cost for label, cost in known.items() if math.isfinite(cost)}
        return {goal: costs for goal, costs in found.items() if costs}


def qualities(rows: Sequence[Result], worse: Mapping[str, float], quality: PerplexityReference) -> Qualities:
    """The qualities of the labels of a strategy's rows, with the targets of all seeds of their perplexities' runs."""
    runs: defaultdict[str, dict[str, Sequence[Result]]] = defaultdict(dict)
    for row in {row.compressor: row for row in rows}.values():
        try:
            seeds = list(quality.seeds(row).values())
        except BadInput:
            continue  # without a perplexity
        for target in dict.fromkeys(name for run in seeds for name in run.steps_to_target or {}):
            runs[target][row.compressor] = seeds
    return Qualities(worse, runs)


def seconds_to(target: str, runs: Sequence[Result], step: float, baseline: float | None) -> float:
    """Seconds to a target, the median over the seeds that have it; infinite if it is missed, NaN if it is unknown.

    Args:
        target: Its name.
        runs: The runs whose steps count.
        step: Seconds of a step after the dense ones.
        baseline: Seconds of a dense step.
    """
    each = [(run, steps[target]) for run in runs if target in (steps := run.steps_to_target or {})]
    found = [math.inf if steps is None else duration(steps, run, step, baseline) for run, steps in each]
    known = [seconds for seconds in found if seconds is not None]
    return median(known) if 0 < len(known) == len(found) else math.nan


class Choice(NamedTuple):
    """The label chosen for a goal on a link that the predictions did not see.

    Attributes:
        strategy: The data-parallel strategy.
        link: The link.
        goal: A limit of perplexity, or a target.
        chosen: The label that is best as predicted.
        best: The label that is best as measured.
        regret: How much more the chosen label costs than the best one, as measured; 0.1 is 10 % more.
    """

    strategy: str
    link: str
    goal: str
    chosen: str
    best: str
    regret: float


def choices(left_out: Sequence[LeftOut], known: Mapping[str, Qualities]) -> list[Choice]:
    """The choices on each link, made from measurements on the others.

    Args:
        left_out: Each measured cell with its predicted step.
        known: The qualities of each strategy's labels.
    """
    cells: defaultdict[tuple[str, str], defaultdict[str, list[LeftOut]]] = defaultdict(lambda: defaultdict(list))
    for one in left_out:
        cells[one.measurement.strategy, one.measurement.link][one.measurement.label].append(one)
    found = []
    for (strategy, link), by_label in cells.items():
        predicted = known[strategy].costs({label: fmean(one.step for one in runs) for label, runs in by_label.items()})
        measured = known[strategy].costs(
            {label: fmean(one.measurement.step for one in runs) for label, runs in by_label.items()}
        )
        for goal, costs in measured.items():
            chosen, best = (min(each, key=each.__getitem__) for each in (predicted[goal], costs))
            found.append(Choice(strategy, link, goal, chosen, best, costs[chosen] / costs[best] - 1))
    return found
