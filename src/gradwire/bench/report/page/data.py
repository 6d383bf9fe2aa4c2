"""Input of the page, and its sections with their captions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from gradwire.bench.config import BASELINE
from gradwire.bench.report.page import curves
from gradwire.bench.report.page.curves import WINDOWS
from gradwire.bench.report.page.style import Drawing, Look, looks
from gradwire.bench.report.rows.record import BF16
from gradwire.bench.report.tables.cells import Group
from gradwire.bench.report.tables.checks import Gate
from gradwire.bench.report.tables.headline import Finding
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.table import SPREAD, Table
from gradwire.bench.statistics.seeds import LEAST

TEMPLATES = Path(__file__).with_name("templates")
Content = dict[str, Any] | str  # the fields of a section, or why it is empty


@dataclass(frozen=True)
class Data(Results):
    """Input of all sections: an experiment, and what its figures need."""

    @cached_property
    def looks(self) -> dict[str, Look]:
        """How each label is drawn."""
        return looks(sorted({row.compressor for row in self.rows}))

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
        failures: Runs without a result, as from `sections.failures`.
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
    failures: Sequence[Mapping[str, Any]] = ()
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


def section(key: str, content: Content) -> Section:
    """Make a section with its captions; ``values`` of its content are formatted into them."""
    known = {"baseline": BASELINE, "bf16": BF16, "spread": SPREAD, "least": LEAST, "windows": WINDOWS}
    if not isinstance(content, str):
        known |= content.pop("values", {})
    caption = captions()[key]
    title = caption["title"].format_map(known)
    names = caption.get("question", ""), title, caption.get("short", title)
    if isinstance(content, str):
        return Section(key, *names, absent=content)
    return Section(key, *names, caption.get("lead", "").format_map(known), **content)
