"""The command ``summarize``: all runs of an experiment as ``results.jsonl``, ``results.csv`` and ``summary.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from gradwire.base.files import write_text
from gradwire.base.strict import Strict


class Options(Strict):
    """Flags of ``gradwire summarize``."""

    results_dir: Path = Field(description="the experiment's folder, results/<name>")
    experiment: Path | None = Field(
        None, description="JSON list of the requested runs; default: RESULTS_DIR/expected.json if it exists"
    )
    quality_from: Path | None = Field(
        None,
        description="results.jsonl of another experiment, with perplexities for runs that have none; default: the one "
        "named in the list of runs",
    )


def output_dir(options: Options) -> Path | None:
    """The experiment's folder, or None if it does not exist."""
    return options.results_dir if options.results_dir.is_dir() else None


def main(options: Options) -> None:
    """Write the results and the summary, and print what a screen has room for."""
    from gradwire.bench.report.rows.record import csv_text, jsonl
    from gradwire.bench.report.rows.runs import SHARED
    from gradwire.bench.report.tables.across_runs import joined
    from gradwire.bench.report.tables.glance import terminal
    from gradwire.bench.report.tables.results import Results
    from gradwire.bench.report.tables.summary import summary

    folder = options.results_dir
    rows, reference, notes = joined(folder, options.experiment, options.quality_from)
    for note in notes:
        print(f"gradwire summarize: {note}", file=sys.stderr)
    results = Results(folder, rows, reference, SHARED in notes, notes)
    files = {"results.jsonl": jsonl(rows), "results.csv": csv_text(rows), "summary.md": summary(results)}
    for name, content in files.items():
        write_text(folder / name, content)
    print(terminal(results))
