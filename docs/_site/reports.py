"""A hook of MkDocs: example reports, built from the records in benchmarks/ and their experiments in configs/.

Each is what `gradwire report` makes of ``benchmarks/NAME.jsonl`` and ``configs/NAME.yaml``, or ``config.yaml`` for
``default``. A section that needs files of the runs, such as curves of the loss, gives that reason.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from gradwire.base.files import write_json
from gradwire.bench.config import BASELINE
from gradwire.bench.config.file import check, read
from gradwire.bench.report.rows.record import read_results

ROOT = Path(__file__).parents[2]
TITLE = re.compile(r"<h1[^>]*>(.*?)</h1>", re.DOTALL)
INDEX = """# Example reports

They are built with this documentation from the records in `benchmarks/`. A report of your own run also has curves, the
time within a step, and files of each figure and table ([the report](../how-to/report.md)).

| question | experiment |
|:--|:--|
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each experiment whose records are here, and one that lists them."""
    pages = {records.stem: report(records) for records in compared(sorted((ROOT / "benchmarks").glob("*.jsonl")))}
    for name, page in pages.items():
        files.append(File.generated(config, f"reports/{name}.html", content=page))
    files.append(
        File.generated(config, "reports/index.md", content=INDEX + "\n".join(map(line, pages, pages.values())))
    )
    return files


def compared(files: Sequence[Path]) -> list[Path]:
    """The files of records that have a baseline to compare with."""
    return [file for file in files if any(row.compressor == BASELINE for row in read_results(file)[0])]


def configuration(name: str) -> str:
    """The path of an experiment's configuration."""
    return "config.yaml" if name == "default" else f"configs/{name}.yaml"


def report(records: Path) -> str:
    """The page of an experiment's records."""
    mapping = read(ROOT / configuration(records.stem))
    experiment = check(mapping)
    asked = [{**run._asdict(), "excluded": None, "shared": not experiment.timed} for run in experiment.asked()]
    with TemporaryDirectory() as parent:
        folder = Path(parent) / records.stem
        folder.mkdir()
        shutil.copy(records, folder / "results.jsonl")
        write_json(folder / "config.json", mapping)
        write_json(folder / "expected.json", asked)
        command = [sys.executable, "-m", "gradwire", "report", "--results_dir", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PluginError(f"no report of {records}: {done.stderr}")
        return (folder / "report.html").read_text(encoding="utf-8")


def line(name: str, page: str) -> str:
    """A report's row of the list."""
    title, path = TITLE.search(page), configuration(name)
    assert title is not None
    return f"| [{title[1].strip()}]({name}.html) | [{path}](../../{path}) |"
