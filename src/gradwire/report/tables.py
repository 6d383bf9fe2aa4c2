"""Tables for the page, and as CSV, LaTeX and Markdown files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tabulate

from gradwire.files import write_text
from gradwire.report.columns import Column, Entry, Record
from gradwire.report.markdown import MISSING, table


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
        """Format as LaTeX, for the package booktabs."""
        align = ["right" if column.number else "left" for column in self.columns]
        rows = [[text.replace(MISSING, "--") for text in row] for row in self.texts]
        return tabulate.tabulate(
            rows, self.titles, tablefmt="latex_booktabs", colalign=align if rows else None, disable_numparse=True
        )

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
