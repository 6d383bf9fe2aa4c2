"""The verb ``summarize``: all runs of an experiment as ``results.jsonl``, ``results.csv`` and ``summary.md``."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.config import Run
from gradwire.errors import BadInput
from gradwire.files import read_json, write_text
from gradwire.report.quality import PerplexityReference, perplexity_reference, with_quality
from gradwire.report.record import RESULT_FIELDS, Result, compared, result, without_measurements

EXPECTED = "expected.json"  # below the experiment's folder: the runs that it asks for


SHARED = "times are shared: other runs may have used the machine at the same time (`timing: true` runs one at a time)"


class Asked(NamedTuple):
    """What an experiment asks for with one run.

    Attributes:
        excluded: Why it is left out, or None.
        quality_from: The results file that it takes its perplexity from, or None.
        shared: Whether other runs may use the machine at the same time.
    """

    excluded: str | None = None
    quality_from: str | None = None
    shared: bool = False


def arguments(parser: ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("--results_dir", type=Path, required=True, help="the experiment's folder, results/<name>")
    parser.add_argument(
        "--experiment",
        type=Path,
        help="JSON list of the runs that the experiment asks for; by default RESULTS_DIR/expected.json if it exists",
    )
    parser.add_argument(
        "--quality_from",
        type=Path,
        metavar="FILE",
        help="results.jsonl of another experiment, whose perplexities stand for runs that have none; by default the "
        "one that the list of runs names",
    )
    parser.add_argument("--print_only", action="store_true", help="print the table and write nothing")


def beside(args: Namespace) -> Path | None:
    """The experiment's folder; a folder that does not exist is not made for the sake of telling so."""
    return args.results_dir if args.results_dir.is_dir() else None


def main(args: Namespace) -> None:
    """Write the results and print the table."""
    from gradwire.report.table import summary
    from gradwire.report.tiers import tiers

    results, found, notes = joined(args.results_dir, args.experiment, args.quality_from)
    for note in notes:
        print(f"gradwire summarize: {note}", file=sys.stderr)
    text = summary(args.results_dir.resolve().name, results, tiers(results, found), notes)
    if not args.print_only:
        lines, table = jsonl(results), csv_text(results)
        write_text(args.results_dir / "results.jsonl", lines)
        write_text(args.results_dir / "results.csv", table)
        write_text(args.results_dir / "summary.md", text)
    print(text)


def joined(
    results_dir: Path, experiment: Path | None = None, quality_from: Path | None = None
) -> tuple[list[Result], PerplexityReference, list[str]]:
    """A row for every run, those without a perplexity with that of another experiment.

    Args:
        results_dir: The experiment's folder.
        experiment: As for `collect`.
        quality_from: The results file of the other experiment; by default the one that the list of runs names, if any.

    Returns:
        The rows; the runs whose perplexities count, its own where there is no other experiment; what could not be used.

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
    """A row for every run, in the order of their names.

    Args:
        results_dir: The experiment's folder.
        experiment: The list of runs that the experiment asks for; the default is ``results_dir/expected.json``. Where
            there is none, the runs on disk are the experiment. Runs on disk that it does not ask for are left out,
            and said so on standard error: they may have been made under other settings.

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
        print(f"gradwire summarize: not asked for by {listed}, left out: {', '.join(strangers)}", file=sys.stderr)
    rows = [
        without_measurements(run, "skipped", one.excluded)
        if one.excluded
        else result(results_dir / "runs" / run.path, run)
        for run, one in sorted(asked.items())
    ]
    return compared(rows, results_dir)


def asked_for(results_dir: Path, experiment: Path | None = None) -> dict[Run, Asked]:
    """The runs that make the experiment: those of the list, where there is none those on disk."""
    if experiment is None and (results_dir / EXPECTED).exists():
        experiment = results_dir / EXPECTED
    return dict.fromkeys(run_folders(results_dir), Asked()) if experiment is None else expected(experiment)


def run_folders(results_dir: Path) -> dict[Run, Path]:
    """The folders of runs on disk."""
    found = {}
    for folder in (results_dir / "runs").glob("*/*/ws*/*/seed*"):
        strategy, compressor, world_size, link, seed = folder.parts[-5:]
        if re.fullmatch(r"ws\d+", world_size) and re.fullmatch(r"seed\d+", seed):
            run = Run(strategy, compressor, int(world_size.removeprefix("ws")), link, int(seed.removeprefix("seed")))
            found[run] = folder
    return found


def expected(path: Path) -> dict[Run, Asked]:
    """The runs that an experiment asks for.

    Raises:
        BadInput: If the file is not such a list.
    """
    try:
        return {
            Run(*(cell[field] for field in Run._fields)): Asked(
                cell["excluded"], cell.get("quality_from"), cell.get("shared", False)
            )
            for cell in read_json(path)
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is no list of runs with {', '.join(Run._fields)}, excluded ({error!r}).") from None


def jsonl(results: Sequence[Result]) -> str:
    """One strict JSON object per line."""
    return "".join(json.dumps(row.model_dump(), ensure_ascii=False, allow_nan=False) + "\n" for row in results)


def csv_text(results: Sequence[Result]) -> str:
    """The same rows as CSV; mappings are JSON in their cell, null is empty."""

    def plain(value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value

    text = io.StringIO()
    writer = csv.DictWriter(text, RESULT_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({field: plain(value) for field, value in row.model_dump().items()} for row in results)
    return text.getvalue()
