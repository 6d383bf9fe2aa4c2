"""The command ``compare``: differences of cells between two experiments, paired by seed, with tests of significance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gradwire.base.files import check_folder
from gradwire.base.flags import Positional
from gradwire.base.strict import Strict


class Options(Strict):
    """Arguments of ``gradwire compare``."""

    first: Annotated[Path, Positional("A")] = Field(description="the first experiment's folder, results/<name>")
    second: Annotated[Path, Positional("B")] = Field(description="the second one's: differences are of B from A")
    tables: Path | None = Field(None, description="folder for the tables too, as CSV, LaTeX and Markdown")
    as_json: bool = Field(False, alias="json", description="print the differences of each quantity as JSON")


def main(options: Options) -> None:
    """Print the differences as Markdown or JSON."""
    from gradwire.bench.report.tables.comparison import DIFFERENCES, QUANTITIES, common, compared, differences
    from gradwire.bench.report.tables.results import Results

    if options.tables is not None:
        check_folder(options.tables, "--tables")
    first, second = Results.read(options.first), Results.read(options.second)
    if options.as_json:
        pairs = common(first.ok, second.ok)
        records = {of.field: [cell.record() for cell in differences(pairs, of)] for of in QUANTITIES}
        print(json.dumps(records, indent=2, ensure_ascii=False))
        return
    tables, notes = compared(first, second)
    texts = [f"## {table.caption}\n\n{table.markdown()}" for table in tables]
    print("\n\n".join([f"# {options.second} against {options.first}", DIFFERENCES, *notes, *texts]))
    if options.tables is not None:
        for table in tables:
            table.save(options.tables)
