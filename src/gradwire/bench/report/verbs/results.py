"""The verb ``results``: an experiment's results by run; `load_results` returns them as a pandas frame."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gradwire.base.errors import BadInput, unknown
from gradwire.base.flags import Positional
from gradwire.base.strict import Strict
from gradwire.bench.report.rows.record import RESULT_FIELDS, read_results

if TYPE_CHECKING:
    import pandas as pd

SHOWN = ("run_name", "status", "all_bytes_ratio", "compression_ratio", "val_ppl", "step_time_ms_mean")


class Options(Strict):
    """Arguments of ``gradwire results``."""

    results_dir: Annotated[Path, Positional("DIR")] = Field(description="the experiment's folder, results/<name>")
    columns: tuple[str, ...] = Field(SHOWN, description="fields of results.jsonl to show")
    as_json: bool = Field(False, alias="json", description="print every field as JSON, a list with an object per run")


def main(options: Options) -> None:
    """Print the table.

    Raises:
        BadInput: If there are no results, or no such field.
    """
    for name in options.columns:
        if name not in RESULT_FIELDS:
            raise unknown("field", name, RESULT_FIELDS)
    with warnings.catch_warnings(record=True) as complaints:
        frame = load_results(options.results_dir)
    for complaint in complaints:
        print(f"gradwire results: {complaint.message}", file=sys.stderr)
    if options.as_json:
        print(frame.to_json(orient="records", indent=2, double_precision=15))
    else:
        print(frame[[*options.columns]].to_string(index=False, na_rep="-"))


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
