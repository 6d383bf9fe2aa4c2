"""A section of the page, and its captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gradwire.bench.config import BASELINE
from gradwire.bench.report.page.curves import WINDOWS
from gradwire.bench.report.page.style import Drawing
from gradwire.bench.report.rows.checks import Gate
from gradwire.bench.report.rows.record import BF16, Result
from gradwire.bench.report.tables.headline import Finding
from gradwire.bench.report.tables.table import SPREAD, Table
from gradwire.bench.statistics.seeds import LEAST

TEMPLATES = Path(__file__).with_name("templates")
Content = dict[str, Any] | str  # the fields of a section, or why it is empty


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
    gates: Sequence[Gate] = ()
    failures: Sequence[Result] = ()
    plots: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    findings: Sequence[Finding] = ()


@cache
def captions() -> dict[str, dict[str, str]]:
    """The title, the short title and the lead of each section."""
    read: dict[str, dict[str, str]] = yaml.safe_load((TEMPLATES / "captions.yaml").read_text(encoding="utf-8"))
    return read


def section(key: str, content: Content, **values: Any) -> Section:
    """Make a section with its captions; ``values`` are formatted into them."""
    known = {"baseline": BASELINE, "bf16": BF16, "spread": SPREAD, "least": LEAST, "windows": WINDOWS} | values
    caption = captions()[key]
    title = caption["title"].format_map(known)
    short = caption.get("short", title)
    if isinstance(content, str):
        return Section(key, title, short, absent=content)
    return Section(key, title, short, caption.get("lead", "").format_map(known), **content)
