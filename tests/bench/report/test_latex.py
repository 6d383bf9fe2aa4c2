"""LaTeX tables: pdfLaTeX compiles them, and lacks no character.

Of `tables/table.py`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import made_results
import pytest

from gradwire.base.files import write_json
from gradwire.bench.report.tables.table import Column, Table, text
from gradwire.cli import main

ROOT = Path(__file__).parents[3]
RECORDS = ("quality", "tuning")  # committed records of real runs
PDFLATEX = pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="needs pdflatex: Debian's texlive-latex-recommended"
)
DOCUMENT = r"""\documentclass{article}
\usepackage[landscape,margin=1cm]{geometry}\usepackage{booktabs,longtable}
\begin{document}
%s
\end{document}
"""


def test_characters_that_latex_reads_otherwise_or_lacks_are_written_as_commands():
    rows = [{"ranks": 3, "name": "a_b & 50 %"}, {"ranks": 5, "name": "7 ≠ ∞"}]
    made = Table.of("t", "", rows, [Column("n", "ranks", "{:d}"), text("name", "name")]).latex()
    assert r"\begin{longtable}{rl}" in made
    assert r"a\_b \& 50 \%" in made and r"7 $\neq$ $\infty$" in made
    assert "name" in Table.of("t", "", [], [text("name", "name")]).latex()


def lost(folder: Path, tables: Iterable[Path]) -> list[str]:
    """Characters that are lost when pdfLaTeX compiles tables, each on its own pages."""
    text = "\n\n\\clearpage\n".join(f"\\input{{{table}}}" for table in tables)
    (folder / "page.tex").write_text(DOCUMENT % text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    log = (folder / "page.log").read_text(errors="replace")
    assert "Output written on page.pdf" in log
    return re.findall(r"^Missing character.*", log, re.MULTILINE)


def made_up(folder: Path) -> None:
    """Long names, another rank's environment, a mark, and a target that no seed reached."""
    unreached = {"steps_to_target": {"55": None}, "time_to_target_s": {"55": None}, "bytes_to_target": {"55": None}}
    labels = ["none", *(f"a-compressor-with-a-long-name-{i}" for i in range(5))]
    results = [row.model_copy(update=unreached) for row in made_results.rows(labels, ["ddp"], [(2, "none")], [0, 1])]
    results[3] = results[3].model_copy(update={"meter_agrees": False})
    made_results.write(folder, results)
    other = {
        **made_results.ENVIRONMENT,
        "packages": {f"a-package-of-{i}": f"{i}.13.0+cpu" for i in range(24)},
        "rank": 1,
    }
    write_json(folder / "runs" / results[0].run_name / "environment" / "rank1.json", other)


def committed(folder: Path) -> None:
    """The records that this repository's tables are made of."""
    folder.mkdir()
    shutil.copy(ROOT / "benchmarks" / f"{folder.name}.jsonl", folder / "results.jsonl")


@pytest.mark.full
@PDFLATEX
@pytest.mark.parametrize("name", ["made-up", *RECORDS])
def test_tables_of_a_report_compile(tmp_path, name):
    folder = tmp_path / name
    (committed if name in RECORDS else made_up)(folder)
    assert main(["report", "--results_dir", str(folder)]) == 0
    tables = sorted((folder / "tables").glob("*.tex"))
    if name not in RECORDS:
        assert {"cells", "environment", "step-time", "stores", "targets"} <= {table.stem for table in tables}
    assert not lost(tmp_path, tables)
