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
from typing import Any

from gradwire.config import Run
from gradwire.errors import BadInput
from gradwire.files import read_json, write_text
from gradwire.report.record import RESULT_FIELDS, Result, result, without_measurements


def arguments(parser: ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("--results_dir", type=Path, required=True, help="the experiment's folder, results/<name>")
    parser.add_argument(
        "--experiment",
        type=Path,
        help="JSON list of the runs that the experiment asks for; by default RESULTS_DIR/expected.json if it exists",
    )
    parser.add_argument("--print_only", action="store_true", help="print the table and write nothing")


def beside(args: Namespace) -> Path | None:
    """The experiment's folder; a folder that does not exist is not made for the sake of telling so."""
    return args.results_dir if args.results_dir.is_dir() else None


def main(args: Namespace) -> None:
    """Write the results and print the table."""
    from gradwire.report.table import summary

    results = collect(args.results_dir, args.experiment)
    text = summary(args.results_dir.resolve().name, results)
    if not args.print_only:
        lines, table = jsonl(results), csv_text(results)
        write_text(args.results_dir / "results.jsonl", lines)
        write_text(args.results_dir / "results.csv", table)
        write_text(args.results_dir / "summary.md", text)
    print(text)


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
    if experiment is None and (results_dir / "expected.json").exists():
        experiment = results_dir / "expected.json"
    asked = dict.fromkeys(folders) if experiment is None else expected(experiment)
    if not asked:
        raise BadInput(f"{results_dir} holds no run (runs/<strategy>/<compressor>/ws<W>/<link>/seed<S>) to summarize.")
    strangers = sorted(run.path for run in folders if run not in asked)
    if strangers:
        print(f"gradwire summarize: not asked for by {experiment}, left out: {', '.join(strangers)}", file=sys.stderr)
    return [
        without_measurements(run, "skipped", reason) if reason else result(results_dir / "runs" / run.path, run)
        for run, reason in sorted(asked.items())
    ]


def run_folders(results_dir: Path) -> dict[Run, Path]:
    """The folders of runs on disk."""
    found = {}
    for folder in (results_dir / "runs").glob("*/*/ws*/*/seed*"):
        strategy, compressor, world_size, link, seed = folder.parts[-5:]
        if re.fullmatch(r"ws\d+", world_size) and re.fullmatch(r"seed\d+", seed):
            run = Run(strategy, compressor, int(world_size.removeprefix("ws")), link, int(seed.removeprefix("seed")))
            found[run] = folder
    return found


def expected(path: Path) -> dict[Run, str | None]:
    """The runs that an experiment asks for, each with the reason why it is left out, or None.

    Raises:
        BadInput: If the file is not such a list.
    """
    try:
        return {Run(*(cell[field] for field in Run._fields)): cell["excluded"] for cell in read_json(path)}
    except (KeyError, TypeError) as error:
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
