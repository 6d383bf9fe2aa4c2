"""Input of the page and of comparisons, and the page's sections with their captions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from gradwire.base.errors import BadInput
from gradwire.bench.config import BASELINE
from gradwire.bench.report.page import curves
from gradwire.bench.report.page.curves import WINDOWS
from gradwire.bench.report.page.style import Drawing, Look, looks
from gradwire.bench.report.rows.record import BF16, Result, read_results
from gradwire.bench.report.rows.runs import asked_for
from gradwire.bench.report.tables import time_to_loss
from gradwire.bench.report.tables.cells import Group, cells_of, groups, one_by_one
from gradwire.bench.report.tables.checks import Gate
from gradwire.bench.report.tables.headline import Finding, Known, findings
from gradwire.bench.report.tables.quality import CellKey, PerplexityReference, Quality, qualities, reference_of
from gradwire.bench.report.tables.table import SPREAD, Table
from gradwire.bench.statistics.seeds import LEAST

TEMPLATES = Path(__file__).with_name("templates")
Content = dict[str, Any] | str  # the fields of a section, or why it is empty


@dataclass(frozen=True)
class Data:
    """Input of all sections.

    Args:
        results_dir: The experiment's folder.
        results: Its rows.
        quality: The runs whose perplexities count.
        shared: Whether runs may have shared the machine.
        notes: Descriptions of unusable files.
    """

    results_dir: Path
    results: Sequence[Result]
    quality: PerplexityReference
    shared: bool = False
    notes: list[str] = field(default_factory=list)

    @cached_property
    def ok(self) -> list[Result]:
        """The rows with a result."""
        return [row for row in self.results if row.status == "ok"]

    @cached_property
    def cells(self) -> pd.DataFrame | None:
        """Statistics over seeds; None if no run has a result."""
        return cells_of(self.results, self.quality) if self.ok else None

    @cached_property
    def runs(self) -> pd.DataFrame:
        """Single runs."""
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
        return time_to_loss.cells(self.results, self.quality)

    @cached_property
    def findings(self) -> list[Finding]:
        """Which compressor wins in which regime."""
        return findings(self.cells, Known(self.ok, self.quality, self.times, self.shared))

    @cached_property
    def looks(self) -> dict[str, Look]:
        """How each label is drawn."""
        return looks(sorted({row.compressor for row in self.results}))

    @cached_property
    def run_curves(self) -> dict[str, curves.Curves]:
        """The runs' curves from ``steps.parquet``."""
        by_run, complaints = curves.read_runs(self.ok, self.results_dir)
        self.notes.extend(complaints)
        return by_run

    def lines(self, column: str) -> dict[Group, dict[str, curves.Line]]:
        """A column of the curves over seeds, by group and label; unmeasured cells are left out."""
        lines: dict[Group, dict[str, curves.Line]] = {}
        for group in self.groups:
            runs: defaultdict[str, list[curves.Curves]] = defaultdict(list)
            for row in group.rows(self.ok):
                if row.run_name in self.run_curves:
                    runs[row.compressor].append(self.run_curves[row.run_name])
            for label in sorted(runs, key=lambda label: (label != BASELINE, label)):
                if (line := curves.line(runs[label], column)) is not None:
                    lines.setdefault(group, {})[label] = line
        return lines


def read(results_dir: Path) -> Data:
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
    return Data(results_dir, rows, quality, shared, [*complaints, *doubts])


class Failures(NamedTuple):
    """Runs that ended alike without a result.

    Attributes:
        status: How.
        reason: Why.
        runs: Their names.
    """

    status: str
    reason: str
    runs: Sequence[str]

    @classmethod
    def of(cls, results: Iterable[Result], *statuses: str) -> list[Failures]:
        """The runs that ended in one of these ways."""
        runs: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for row in results:
            if row.status in statuses:
                runs[row.status, row.reason or "no reason was given"].append(row.run_name)
        return [cls(*why, names) for why, names in runs.items()]


@dataclass
class Section:
    """A part of the page.

    Args:
        key: Its id, and the start of its file names.
        question: The question that it answers, the heading of its sections together; empty for the first section.
        title: Its heading.
        short: The heading in the list of sections.
        lead: What it shows and how it was computed.
        absent: Why the section is empty, if it is.
        properties: Terms and their values.
        gates: Checks.
        failures: Runs without a result: how they ended and why, and their names.
        plots: Figures to draw.
        tables: Tables.
        notes: Further notes.
        findings: Which compressor wins in which regime.
        asides: Sentences after the findings.
    """

    key: str
    question: str
    title: str
    short: str
    lead: str = ""
    absent: str = ""
    properties: Sequence[tuple[str, str]] = ()
    gates: Sequence[Gate] = ()
    failures: Sequence[Failures] = ()
    plots: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    findings: Sequence[Finding] = ()
    asides: Sequence[str] = ()


@cache
def captions() -> dict[str, dict[str, str]]:
    """The question, the title, the short title and the lead of each section."""
    read: dict[str, dict[str, str]] = yaml.safe_load((TEMPLATES / "captions.yaml").read_text(encoding="utf-8"))
    return read


def section(key: str, content: Content, **values: Any) -> Section:
    """Make a section with its captions; ``values`` are formatted into them."""
    known = {"baseline": BASELINE, "bf16": BF16, "spread": SPREAD, "least": LEAST, "windows": WINDOWS} | values
    caption = captions()[key]
    title = caption["title"].format_map(known)
    names = caption.get("question", ""), title, caption.get("short", title)
    if isinstance(content, str):
        return Section(key, *names, absent=content)
    return Section(key, *names, caption.get("lead", "").format_map(known), **content)
