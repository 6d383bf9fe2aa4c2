"""The verb ``results``: an experiment's results by run; `load_results` returns them as a pandas frame."""

from __future__ import annotations

import sys
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.base.errors import BadInput, unknown
from gradwire.bench.report.rows.record import RESULT_FIELDS
from gradwire.bench.report.rows.results_file import read_results

if TYPE_CHECKING:
    import pandas as pd

SHOWN = ("run_name", "status", "all_bytes_ratio", "compression_ratio", "val_ppl", "step_time_ms_mean")


def arguments(parser: ArgumentParser) -> None:
    """Define the verb's arguments."""
    parser.add_argument("results_dir", type=Path, metavar="DIR", help="the experiment's folder, results/<name>")
    parser.add_argument("--columns", nargs="+", metavar="FIELD", default=SHOWN, help="fields of results.jsonl to show")
    parser.add_argument("--json", action="store_true", help="print every field as JSON, a list with an object per run")


def main(args: Namespace) -> None:
    """Print the table.

    Raises:
        BadInput: If there are no results, or no such field.
    """
    for name in args.columns:
        if name not in RESULT_FIELDS:
            raise unknown("field", name, RESULT_FIELDS)
    with warnings.catch_warnings(record=True) as complaints:
        found = load_results(args.results_dir)
    for complaint in complaints:
        print(f"gradwire results: {complaint.message}", file=sys.stderr)
    if args.json:
        print(found.to_json(orient="records", indent=2, double_precision=15))
    else:
        print(found[[*args.columns]].to_string(index=False, na_rep="-"))


def load_results(results_dir: str | Path) -> pd.DataFrame:
    """Read an experiment's results as a pandas frame, one row per run.

    Args:
        results_dir: The experiment's folder, which has ``results.jsonl``, or that file.

    Returns:
        A frame with a column for every field of ``results.jsonl``; what does not apply is None or NaN.

    Raises:
        BadInput: If there are no results.

    Warns:
        UserWarning: For each line that cannot be used, with its number and the reason.
    """
    import pandas as pd

    path = Path(results_dir)
    path = path / "results.jsonl" if path.is_dir() else path
    rows, complaints = read_results(path)
    for complaint in complaints:
        warnings.warn(complaint, stacklevel=2)
    if not rows:
        raise BadInput(f"{path} has no result.")
    return pd.DataFrame([row.model_dump() for row in rows], columns=[*RESULT_FIELDS])
