"""The verb ``summarize``: all runs of an experiment as ``results.jsonl``, ``results.csv`` and ``summary.md``."""

from __future__ import annotations

import csv
import io
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.base.errors import BadInput
from gradwire.base.files import read_json, write_text
from gradwire.bench.config import Run, Targets
from gradwire.bench.report.rows.quality import PerplexityReference, perplexity_reference, with_quality
from gradwire.bench.report.rows.record import RESULT_FIELDS, Result, compared, result, without_measurements
from gradwire.bench.report.rows.targets import with_targets

EXPECTED = "expected.json"  # in the experiment's folder: the requested runs


SHARED = "times are shared: other runs may have used the machine at the same time (`timing: true` runs one at a time)"


class Asked(NamedTuple):
    """The request for one run.

    Attributes:
        excluded: Why it is left out, or None.
        quality_from: The results file with its perplexity, or None.
        shared: Whether other runs may use the machine at the same time.
        targets: The perplexities that it is measured by, if any.
    """

    excluded: str | None = None
    quality_from: str | None = None
    shared: bool = False
    targets: Targets | None = None


def arguments(parser: ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("--results_dir", type=Path, required=True, help="the experiment's folder, results/<name>")
    parser.add_argument(
        "--experiment",
        type=Path,
        help="JSON list of the requested runs; default: RESULTS_DIR/expected.json if it exists",
    )
    parser.add_argument(
        "--quality_from",
        type=Path,
        metavar="FILE",
        help="results.jsonl of another experiment, with perplexities for runs that have none; default: the "
        "one named in the list of runs",
    )
    parser.add_argument("--print_only", action="store_true", help="print the table and write nothing")


def beside(args: Namespace) -> Path | None:
    """The experiment's folder, or None if it does not exist."""
    return args.results_dir if args.results_dir.is_dir() else None


def main(args: Namespace) -> None:
    """Write the results and print the table."""
    from gradwire.bench.report.tables.cells import cells_of
    from gradwire.bench.report.tables.headline import Known, findings
    from gradwire.bench.report.tables.summary import summary
    from gradwire.bench.report.tables.tiers import tiers
    from gradwire.bench.report.tables.time_to_loss import cells, records

    results, found, notes = joined(args.results_dir, args.experiment, args.quality_from)
    for note in notes:
        print(f"gradwire summarize: {note}", file=sys.stderr)
    ok = [row for row in results if row.status == "ok"]
    times = cells(results, found)
    known = Known(ok, found, times, SHARED in notes)
    answers = [f"{one.regime}: {one.text}" for one in findings(cells_of(ok, found) if ok else None, known)]
    name = args.results_dir.resolve().name
    text = summary(name, results, tiers(results, found), notes, answers, records(times))
    if not args.print_only:
        lines, table = jsonl(results), csv_text(results)
        write_text(args.results_dir / "results.jsonl", lines)
        write_text(args.results_dir / "results.csv", table)
        write_text(args.results_dir / "summary.md", text)
    print(text)


def joined(
    results_dir: Path, experiment: Path | None = None, quality_from: Path | None = None
) -> tuple[list[Result], PerplexityReference, list[str]]:
    """Return a row for every run; missing perplexities are taken from another experiment.

    Args:
        results_dir: The experiment's folder.
        experiment: As for `collect`.
        quality_from: The results file of the other experiment; by default the one named in the list of runs, if any.

    Returns:
        The rows, the runs whose perplexities count (of this or the other experiment), and complaints.

    Raises:
        BadInput: As `collect`; if a results file cannot be read; if the list names several.
    """
    results = collect(results_dir, experiment)
    asked = asked_for(results_dir, experiment).values()
    notes = [SHARED] if any(one.shared for one in asked) else []
    named = {one.quality_from for one in asked} - {None}
    if len(named) > 1 and quality_from is None:
        raise BadInput(f"the runs of {results_dir} name several files for quality_from: {', '.join(map(str, named))}.")
    path = quality_from or next((Path(str(name)) for name in named), None)
    if path is None:
        return results, PerplexityReference.of(str(results_dir), results), notes
    found, complaints = perplexity_reference(path)
    results, unmatched = with_quality(results, found)
    return results, found, [*notes, *complaints, *unmatched]


def collect(results_dir: Path, experiment: Path | None = None) -> list[Result]:
    """Return a row for every run, sorted by name.

    Args:
        results_dir: The experiment's folder.
        experiment: The list of requested runs; default: ``results_dir/expected.json``. Without a list, all runs on disk
            count. Runs on disk that are not in the list may have other settings: they are left out, with a note on
            standard error.

    Raises:
        BadInput: If there is nothing to summarize, or the list is unusable.
    """
    folders = run_folders(results_dir)
    asked = asked_for(results_dir, experiment)
    if not asked:
        raise BadInput(f"{results_dir} holds no run (runs/<strategy>/<compressor>/ws<W>/<link>/seed<S>) to summarize.")
    strangers = sorted(run.path for run in folders if run not in asked)
    if strangers:
        listed = experiment or results_dir / EXPECTED
        print(f"gradwire summarize: not in {listed}, left out: {', '.join(strangers)}", file=sys.stderr)
    rows = [
        without_measurements(run, "skipped", one.excluded)
        if one.excluded
        else result(results_dir / "runs" / run.path, run)
        for run, one in sorted(asked.items())
    ]
    targets = {run: one.targets for run, one in asked.items()}
    return with_targets(compared(rows, results_dir), results_dir, targets)


def asked_for(results_dir: Path, experiment: Path | None = None) -> dict[Run, Asked]:
    """The runs of the experiment: those of the list, or without a list those on disk."""
    if experiment is None and (results_dir / EXPECTED).exists():
        experiment = results_dir / EXPECTED
    return dict.fromkeys(run_folders(results_dir), Asked()) if experiment is None else expected(experiment)


def run_folders(results_dir: Path) -> dict[Run, Path]:
    """The folders of runs on disk."""
    found = {}
    for folder in (results_dir / "runs").glob("*/*/ws*/*/seed*"):
        if run := Run.at("/".join(folder.parts[-5:])):
            found[run] = folder
    return found


def expected(path: Path) -> dict[Run, Asked]:
    """Read the list of requested runs.

    Raises:
        BadInput: If the file is not such a list.
    """
    try:
        return {
            Run(**{field: cell[field] for field in Run._fields if field != "islands" or field in cell}): Asked(
                cell["excluded"],
                cell.get("quality_from"),
                cell.get("shared", False),
                Targets(**cell["targets"]) if cell.get("targets") else None,
            )
            for cell in read_json(path)
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is not a list of runs with {', '.join(Run._fields)}, excluded ({error!r}).") from None


def jsonl(results: Sequence[Result]) -> str:
    """One strict JSON object per line."""
    return "".join(json.dumps(row.model_dump(), ensure_ascii=False, allow_nan=False) + "\n" for row in results)


def csv_text(results: Sequence[Result]) -> str:
    """The same rows as CSV; mappings are JSON, null is empty."""

    def plain(value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value

    text = io.StringIO()
    writer = csv.DictWriter(text, RESULT_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({field: plain(value) for field, value in row.model_dump().items()} for row in results)
    return text.getvalue()
