"""Tables for the page, and as CSV, LaTeX and Markdown files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradwire.base.files import write_text
from gradwire.bench.report.tables.columns import Column, Entry, Record
from gradwire.bench.report.tables.latex import latex
from gradwire.bench.report.tables.markdown import MISSING, table

KEYS = ("compressor", "strategy", "world_size", "link")


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
        """Format as LaTeX, without the columns that a short table leaves out (`Column.long`)."""
        kept = [at for at, column in enumerate(self.columns) if not column.long]
        rows = [[row[at] for at in kept] for row in self.texts]
        return latex([self.titles[at] for at in kept], rows, [self.columns[at].number for at in kept])

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
