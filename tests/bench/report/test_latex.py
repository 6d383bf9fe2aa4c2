"""LaTeX tables: pdfLaTeX compiles them, and they fit the page.

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
from gradwire.bench.report.tables.table import LINES, latex
from gradwire.cli import main

ROOT = Path(__file__).parents[3]
RECORDS = ("quality", "tuning")  # committed records of real runs
PDFLATEX = pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="needs pdflatex: Debian's texlive-latex-recommended"
)
DOCUMENT = r"""\documentclass{article}
\usepackage{array,booktabs,graphicx}
\begin{document}
%s
\end{document}
"""


def test_an_entry_that_is_long_is_broken_and_shrinks_nothing():
    rows = [["3", "a_b", "ddp/none/ws2, " * 9], ["5", "7 ≠ ∞", ""]]
    made = latex(["ranks", "name", "runs"], rows, [True, False, False])
    assert r"\begin{tabular}{rl>{\raggedright\arraybackslash}p{20em}}" in made
    assert r"a\_b" in made and r"ddp\slash{}none" in made and r"7 $\neq$ $\infty$" in made and made.isascii()


def many_rows() -> list[list[str]]:
    """Rows for three pages; one has three lines."""
    return [[f"row{i}", "word " * (1 + 20 * (i == 7))] for i in range(2 * LINES)]


def test_rows_that_do_not_fit_a_page_are_several_tables_with_the_same_headings():
    pages = latex(["name", "text"], many_rows(), [False, False]).split("\n\n")
    assert [len(re.findall(r"row\d+", page)) for page in pages] == [LINES - 2, LINES, 2]
    assert all(r"name" in page and page.count(r"\begin{tabular}") == 1 for page in pages)
    assert re.findall(r"row(\d+)", "".join(pages)) == [str(i) for i in range(2 * LINES)]
    assert latex(["name", "text"], [], [False, False]).count(r"\\") == 1


def misfits(folder: Path, tables: Iterable[Path]) -> list[str]:
    """Boxes that do not fit and characters that are lost when pdfLaTeX compiles tables, each on a page of its own."""
    text = "\n\n\\clearpage\n".join(f"\\input{{{table}}}" for table in tables)
    (folder / "page.tex").write_text(DOCUMENT % text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    log = (folder / "page.log").read_text(errors="replace")
    assert "Output written on page.pdf" in log
    return re.findall(r"^(?:Overfull|Underfull|Missing character).*", log, re.MULTILINE)


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
def test_tables_of_a_report_compile_and_fit_the_page(tmp_path, name):
    folder = tmp_path / name
    (committed if name in RECORDS else made_up)(folder)
    assert main(["report", "--results_dir", str(folder)]) == 0
    tables = sorted((folder / "tables").glob("*.tex"))
    if name not in RECORDS:
        assert {"cells", "environment", "step-time", "stores", "targets"} <= {table.stem for table in tables}
    assert not misfits(tmp_path, tables)


@pytest.mark.full
@PDFLATEX
def test_many_rows_compile_and_fit_the_page(tmp_path):
    (tmp_path / "long.tex").write_text(latex(["name", "text"], many_rows(), [False, False]) + "\n")
    assert not misfits(tmp_path, [tmp_path / "long.tex"])
