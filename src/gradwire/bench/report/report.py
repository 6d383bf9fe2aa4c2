"""The command ``report``: one self-contained page of results, with its figures and tables as files."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from gradwire.base.strict import Strict


class Options(Strict):
    """Flags of ``gradwire report``."""

    results_dir: Path = Field(description="the experiment's folder, results/<name>")
    compare_with: Path | None = Field(None, description="another experiment's folder: adds a section of differences")


def output_dir(options: Options) -> Path | None:
    """The experiment's folder, or None if it does not exist."""
    return options.results_dir if options.results_dir.is_dir() else None


def main(options: Options) -> None:
    """Write ``report.html``, ``figures/`` and ``tables/``, and print the page's path."""
    from gradwire.bench.report.page.render import write
    from gradwire.bench.report.page.sections import Data, comparison, sections

    data = Data.read(options.results_dir)
    made = sections(data)
    if options.compare_with is not None:
        made.append(comparison(data, Data.read(options.compare_with)))
    figures = write(data, made)
    for note in data.notes:
        print(f"gradwire report: {note}", file=sys.stderr)
    page = options.results_dir / "report.html"
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB, {figures} figures)")
