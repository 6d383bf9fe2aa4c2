"""Perplexities of another experiment, for runs that are too short to have their own.

Quality does not depend on the link, so a timing cell takes the perplexity of a long run with its label: of its own
strategy if that has one, else of ddp, else of any. The two may differ only in their numbers of steps and of warm-up
steps (``dense_steps``, ``freeze_step``), and in the learning rate; otherwise the cell has no perplexity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from gradwire.base.errors import BadInput
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import OWN_QUALITY, Result, read_results
from gradwire.bench.report.rows.targets import on_link
from gradwire.bench.statistics.seeds import percent_worse, percents

PREFERRED = "ddp"  # the strategy whose perplexity others use if they have none
FREE = ("dense_steps", "freeze_step", "lr", "beta2")  # options that change no step time after the warm-up
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
        """Keep the rows that have a perplexity."""
        return cls(name, tuple(row for row in rows if row.val_ppl is not None))

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
        return {run.seed: run for run in alike if run.strategy == wanted}

    def percent_worse(self, row: Result, baseline: Result) -> list[float]:
        """Percent by which a cell's perplexity is above the baseline's, by seed; empty if one is unknown."""
        try:
            runs = self.seeds(row)
            against = self.seeds(baseline, next(iter(runs.values())).strategy)
        except BadInput:
            return []
        return percent_worse(*({seed: run.val_ppl or 0.0 for seed, run in of.items()} for of in (runs, against)))

    def mean_percent_worse(self, rows: Sequence[Result]) -> dict[str, float]:
        """Percent by which each label's mean perplexity is above that of the baseline, where both are known.

        Args:
            rows: Runs of one strategy, the baseline's among them.
        """
        baseline = next(row for row in rows if row.compressor == BASELINE)
        samples = {row.compressor: self.percent_worse(row, baseline) for row in rows if row.compressor != BASELINE}
        return {BASELINE: 0.0} | {label: percents([of])[0].mean for label, of in samples.items() if of}


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
    sources = [row.quality_from for row in rows if row.quality_from and row.quality_from not in OWN_QUALITY]
    named = sorted({source.partition(": ")[0] for source in sources})
    if len(named) == 1 and Path(named[0]).is_file():
        return perplexity_reference(Path(named[0]))
    doubts = [f"{name}, the source of perplexities, is missing: {path} has one seed of them" for name in named]
    return PerplexityReference.of(str(path), rows), doubts


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
