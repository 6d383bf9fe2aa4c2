"""Quality of cells: their perplexities against those of the same optimizer in every step.

Quality does not depend on the link, so a timing cell takes the perplexity of a long run with its label: of the
same strategy if that has one, else of ddp, else of any. The two may differ only in their numbers of steps and of
warm-up steps (``dense_steps``), and in the learning rate; otherwise the cell has no perplexity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

from gradwire.base.errors import BadInput
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import Result, read_results
from gradwire.bench.statistics.seeds import Estimate, percent_worse, percents

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
