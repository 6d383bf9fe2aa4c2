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
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.rows.results_file import read_results
from gradwire.bench.report.rows.targets import on_own_link
from gradwire.bench.statistics.seeds import percent_worse

PREFERRED = "ddp"  # the strategy whose perplexity others use if they have none
FREE = ("dense_steps", "freeze_step", "lr", "beta2")  # options that change no step time after the warm-up
SAME = (
    "compress_config",
    "model",
    "parameters",
    "dataset",
    "max_length",
    "batch_size",
    "precision",
    "optimizer",
    "world_size",
)


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
    def by_label(self) -> dict[str, list[Result]]:
        """The rows of each label."""
        found: defaultdict[str, list[Result]] = defaultdict(list)
        for row in self.rows:
            found[row.compressor].append(row)
        return dict(found)

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
        alike = [one for one in labelled if not differences(one, row)]
        if not alike:
            differing = ", ".join(differences(labelled[0], row))
            raise BadInput(f"{self.name} has {row.compressor} with another {differing} ({labelled[0].run_name})")
        present = sorted({one.strategy for one in alike})
        wanted = next(one for one in (strategy or row.strategy, PREFERRED, *present) if one in present)
        return {one.seed: one for one in alike if one.strategy == wanted}

    def percent_worse(self, row: Result, baseline: Result) -> list[float]:
        """Percent by which a cell's perplexity is above the baseline's, by seed; empty if one is unknown."""
        try:
            own = self.seeds(row)
            against = self.seeds(baseline, next(iter(own.values())).strategy)
        except BadInput:
            return []
        return percent_worse(_perplexities(own), _perplexities(against))


def _perplexities(runs: Mapping[int, Result]) -> dict[int, float]:
    return {seed: run.val_ppl for seed, run in runs.items() if run.val_ppl is not None}


def differences(one: Result, other: Result) -> list[str]:
    """Fields that differ between two runs and must not for their qualities to be equal."""
    return [field for field in SAME if _compared(one, field) != _compared(other, field)]


def _compared(row: Result, field: str) -> Any:
    value = getattr(row, field)
    return {key: of for key, of in value.items() if key not in FREE} if isinstance(value, dict) else value


def perplexity_reference(path: Path) -> tuple[PerplexityReference, list[str]]:
    """Read the perplexities of a results file; return them with complaints about skipped lines."""
    rows, complaints = read_results(path)
    return PerplexityReference.of(str(path), rows), complaints


def with_quality(results: Sequence[Result], found: PerplexityReference) -> tuple[list[Result], list[str]]:
    """Fill in missing perplexities by label and seed; return the rows with complaints about those still missing."""
    joined, complaints = [], []
    for row in results:
        if row.status == "ok" and row.val_ppl is None:
            try:
                row = _joined(row, found, results)
            except BadInput as error:
                complaints.append(f"{row.run_name} has no perplexity: {error}")
        joined.append(row)
    return joined, complaints


def _joined(row: Result, found: PerplexityReference, results: Sequence[Result]) -> Result:
    """Fill in the perplexity of the row's own seed, and what it took to reach targets.

    Raises:
        BadInput: If that seed has none.
    """
    seeds = found.seeds(row)
    if row.seed not in seeds:
        raise BadInput(f"{found.name} has no seed {row.seed} of {next(iter(seeds.values())).strategy}/{row.compressor}")
    source = seeds[row.seed]
    quality: dict[str, Any] = {"val_loss": source.val_loss, "val_ppl": source.val_ppl}
    quality |= on_own_link(row, source, results)
    return row.model_copy(update=quality | {"quality_from": f"{found.name}: {source.run_name}"})
