"""Tables for the page, and as CSV, LaTeX and Markdown files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tabulate

from gradwire.files import write_text
from gradwire.report.columns import Column, Entry, Record
from gradwire.report.markdown import MISSING, table

KEYS = ("compressor", "strategy", "world_size", "link")
FITTING = 6  # columns of a LaTeX table that is set in its natural size
LATEX = {  # characters that pdfLaTeX lacks
    "×": r"$\times$",
    "÷": r"$\div$",
    "≠": r"$\neq$",
    "≥": r"$\geq$",
    "α": r"$\alpha$",
    "…": r"\ldots{}",
    "–": "--",
    "−": "$-$",
    "“": "``",
    "”": "''",
}


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        name: The name of its files, without suffix.
        caption: What it shows.
        columns: Its columns.
        rows: Rows of one entry per column.
        commands: A shell command for each row, if any.
        fails: For each row, whether it is marked as failed, if any.
    """

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Entry]]
    commands: Sequence[str] = ()
    fails: Sequence[bool] = ()

    @classmethod
    def of(cls, name: str, caption: str, records: Iterable[Record], columns: Iterable[Column]) -> Table:
        """A table with a row for each record."""
        records = list(records)
        headed = [column.headed(records) for column in columns]
        return cls(name, caption, headed, [[column.entry(record) for column in headed] for record in records])

    def trimmed(self) -> Table:
        """The table without columns that have no entry."""
        kept = [at for at in range(len(self.columns)) if any(row[at].text != MISSING for row in self.rows)]
        return replace(
            self, columns=[self.columns[at] for at in kept], rows=[[row[at] for at in kept] for row in self.rows]
        )

    @property
    def keys(self) -> int:
        """The number of first columns that name a row's cell."""
        keys = [column.field in KEYS for column in self.columns]
        return keys.index(False) if False in keys else len(keys)

    @property
    def texts(self) -> list[list[str]]:
        """The texts of all entries."""
        return [[one.text for one in row] for row in self.rows]

    @property
    def titles(self) -> list[str]:
        """The headings."""
        return [column.title for column in self.columns]

    def markdown(self) -> str:
        """Format as Markdown."""
        left = [i for i, column in enumerate(self.columns) if not column.number]
        rows = [[text.replace("|", "\\|") for text in row] for row in self.texts]
        return table(rows, self.titles, left)

    def latex(self) -> str:
        """Format as LaTeX for pdfLaTeX and the packages booktabs and graphicx, no wider than the text.

        Columns that do not belong into a short table (`Column.long`) are left out.
        """
        kept = [at for at, column in enumerate(self.columns) if not column.long]
        align = ["right" if self.columns[at].number else "left" for at in kept]
        rows = [[row[at] for at in kept] for row in self.texts]
        text = tabulate.tabulate(
            rows,
            [self.titles[at] for at in kept],
            tablefmt="latex_booktabs",
            colalign=align if rows else None,
            disable_numparse=True,
        )
        for character, command in LATEX.items():
            text = text.replace(character, command)
        wide = len(kept) > FITTING
        return f"\\resizebox{{\\textwidth}}{{!}}{{%\n{text}%\n}}" if wide else text

    def csv(self) -> str:
        """Format as CSV, with all digits."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.titles)
        writer.writerows([one.full or one.key for one in row] for row in self.rows)
        return text.getvalue()

    def save(self, folder: Path) -> None:
        """Write all three files."""
        for suffix, text in (("csv", self.csv()), ("tex", self.latex() + "\n"), ("md", self.markdown() + "\n")):
            write_text(folder / f"{self.name}.{suffix}", text)
