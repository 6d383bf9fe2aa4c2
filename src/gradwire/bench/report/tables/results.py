"""An experiment's rows with what is computed of them, once: input of summaries, pages and comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

import pandas as pd

from gradwire.base.errors import BadInput
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import Result, read_results
from gradwire.bench.report.rows.runs import asked_for
from gradwire.bench.report.tables import time_to_loss
from gradwire.bench.report.tables.cells import Group, cells_of, groups, one_by_one
from gradwire.bench.report.tables.quality import (
    CellKey,
    PerplexityReference,
    Quality,
    cell_key,
    qualities,
    reference_of,
)


@dataclass(frozen=True)
class Results:
    """An experiment: its rows, and what is computed of them.

    Args:
        results_dir: The experiment's folder.
        rows: Its rows.
        quality: The runs whose perplexities count.
        shared: Whether runs may have shared the machine.
        notes: Descriptions of unusable files.
    """

    results_dir: Path
    rows: Sequence[Result]
    quality: PerplexityReference
    shared: bool = False
    notes: list[str] = field(default_factory=list)

    @cached_property
    def ok(self) -> list[Result]:
        """The rows with a result."""
        return [row for row in self.rows if row.status == "ok"]

    @cached_property
    def cells(self) -> pd.DataFrame | None:
        """Statistics over seeds; None if no run has a result."""
        return cells_of(self.rows, self.runs, self.judged) if self.ok else None

    @cached_property
    def runs(self) -> pd.DataFrame:
        """Single runs: see `one_by_one`."""
        return one_by_one(self.ok, self.judged)

    @cached_property
    def judged(self) -> dict[CellKey, Quality]:
        """The quality of each cell."""
        return qualities(self.ok, self.quality)

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of cells, in the table's order."""
        return [] if self.cells is None else [group for group, _ in groups(self.cells)]

    @cached_property
    def times(self) -> list[time_to_loss.Cell]:
        """The cells that have targets."""
        return time_to_loss.cells(self.rows, self.quality)

    def percent_worse(self, rows: Iterable[Result]) -> dict[str, float]:
        """Percent of perplexity by which each label is above the same optimizer in every step, where it is known.

        The baseline is compared with itself.

        Args:
            rows: Rows with a result, of one strategy and world size.
        """
        of_labels = {row.compressor: self.judged[cell_key(row)] for row in rows}
        return {BASELINE: 0.0} | {label: of.difference.mean for label, of in of_labels.items() if of.worse}

    @classmethod
    def read(cls, results_dir: Path) -> Self:
        """Read an experiment's results.

        Raises:
            BadInput: If there are no results, or this version cannot read them.
        """
        path = results_dir / "results.jsonl"
        if not path.is_file():
            raise BadInput(
                f"{path} does not exist: run the experiment (`make run`) or, where runs exist, `gradwire summarize`."
            )
        rows, complaints = read_results(path)
        if not rows:
            raise BadInput(complaints[0] if complaints else f"{path} holds no result yet.")
        quality, doubts = reference_of(rows, path)
        shared = any(request.shared for request in asked_for(results_dir).values())
        return cls(results_dir, rows, quality, shared, [*complaints, *doubts])
