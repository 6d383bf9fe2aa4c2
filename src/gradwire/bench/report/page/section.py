"""A section of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from gradwire.bench.report.page.captions import CAPTIONS
from gradwire.bench.report.page.style import Drawing
from gradwire.bench.report.rows import checks as gates
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.headline import Finding
from gradwire.bench.report.tables.table import Table

NO_RESULT = "no run has a result"


@dataclass
class Section:
    """A part of the page.

    Args:
        key: Its id, and the start of its file names.
        title: Its heading.
        short: The heading in the list of sections.
        lead: What it shows and how it was computed.
        absent: Why the section is empty, if it is.
        properties: Terms and their values.
        gates: Checks.
        failures: Runs without a result.
        plots: Figures to draw.
        tables: Tables; the first is shown, the others are folded.
        notes: Further notes.
        findings: Which compressor wins in which regime.
    """

    key: str
    title: str
    short: str
    lead: str = ""
    absent: str = ""
    properties: Sequence[tuple[str, str]] = ()
    gates: Sequence[gates.Gate] = ()
    failures: Sequence[Result] = ()
    plots: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    findings: Sequence[Finding] = ()

    @classmethod
    def of(cls, key: str, **values: Any) -> Self:
        """Make a section with its captions; ``values`` are formatted into them."""
        title, short, lead = CAPTIONS[key]
        return cls(key, title.format(**values), short, lead.format(**values)) if values else cls(key, *CAPTIONS[key])
