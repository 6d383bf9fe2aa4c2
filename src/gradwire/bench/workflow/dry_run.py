"""A dry run on one screen: the number of jobs of each rule, and the runs that would be trained."""

from __future__ import annotations

import logging
import textwrap
from collections import defaultdict
from collections.abc import Iterable

from gradwire.base.units import UNSHAPED
from gradwire.bench.config import Run

WIDTH = 100
DETAILS = "\n    (check individual jobs above for details)"  # in Snakemake's reasons; `ShortDryRun` hides the jobs


def trainings(runs: Iterable[Run]) -> str:
    """Runs by strategy, ranks and link; labels with the same seeds share a line."""
    seeds: defaultdict[Run, list[int]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.strategy, run.world_size, run.islands, run.link != UNSHAPED, run)):
        seeds[run._replace(seed=0)].append(run.seed)
    labels: defaultdict[str, list[str]] = defaultdict(list)
    for run, of_run in seeds.items():
        place = [run.strategy, f"W = {run.world_size}"]
        place += [f"{run.islands} islands"] * (run.islands > 1) + [run.link] * (run.link != UNSHAPED)
        counted = f"seed{'s' * (len(of_run) > 1)} {', '.join(map(str, of_run))}"
        labels[", ".join([*place, counted])].append(run.compressor)
    lines = [f"{place}: {', '.join(of_place)}" for place, of_place in labels.items()]
    return "\n".join(textwrap.indent(textwrap.fill(line, WIDTH, break_on_hyphens=False), "    ") for line in lines)


class ShortDryRun(logging.Filter):
    """Leaves of a dry run's messages one table of jobs, the trainings in place of a second table, and the reasons.

    A filter of Snakemake's own logger. Without it the default experiment's 110 jobs take 950 lines.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted = False
        self.trained: list[Run] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message is printed; it may be changed."""
        match str(getattr(record, "event", None)):
            case "job_info":
                if record.rule_name == "train":  # type: ignore[attr-defined]
                    self.trained.append(Run.of(record.wildcards))  # type: ignore[attr-defined]
                return False
            case "run_info" if self.counted:
                record.msg = f"Trainings:\n{trainings(self.trained)}\n"
                return bool(self.trained)
            case "run_info":
                self.counted = True
        record.msg = str(record.msg).replace(DETAILS, "")
        return True
