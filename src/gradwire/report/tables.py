"""A table as data: for the page, and as CSV, LaTeX and Markdown files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tabulate

from gradwire.files import write_text
from gradwire.report import markdown
from gradwire.report.markdown import MISSING, table


class Entry(NamedTuple):
    """What stands in one place.

    Attributes:
        text: What is read.
        value: What it is sorted by, in full; None is below all others.
        full: What the CSV file has instead of the value.
    """

    text: str
    value: str | float | None = None
    full: str = ""

    @property
    def key(self) -> str:
        """The value as text, empty where there is none."""
        return "" if self.value is None else str(self.value)


def entry(value: float | None, form: str) -> Entry:
    """A number, or a dash for None and NaN."""
    known = value is not None and not math.isnan(value)
    return Entry(form.format(value) if known else MISSING, value if known else None)


def spread(n: int, low: float, high: float, form: str) -> Entry:
    """A spread, sorted by its lower end; a dash where there is none."""
    text = markdown.spread(n, low, high, form)
    return Entry(text) if text == MISSING else Entry(text, low, markdown.spread(n, low, high, "{}"))


def word(text: str) -> Entry:
    """A word."""
    return Entry(text, text)


class Column(NamedTuple):
    """One column.

    Attributes:
        title: Its heading.
        number: Whether it holds numbers, which stand to the right and sort by value.
        hint: What it means, where the heading does not say it.
    """

    title: str
    number: bool = True
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        name: The name of its files.
        caption: What it shows.
        columns: Its columns.
        rows: As many entries each.
        commands: A shell command for each row, if any.
        fails: Which rows are marked as not having passed, if any.
    """

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Entry]]
    commands: Sequence[str] = ()
    fails: Sequence[bool] = ()

    @classmethod
    def of(
        cls, name: str, caption: str, records: Iterable[Any], columns: Mapping[Column, Callable[[Any], Entry]]
    ) -> Table:
        """A table with a row for each record and a function for each column."""
        return cls(name, caption, list(columns), [[make(record) for make in columns.values()] for record in records])

    @property
    def texts(self) -> list[list[str]]:
        """What stands in it."""
        return [[one.text for one in row] for row in self.rows]

    @property
    def titles(self) -> list[str]:
        """Its headings."""
        return [column.title for column in self.columns]

    def markdown(self) -> str:
        """As Markdown."""
        left = [i for i, column in enumerate(self.columns) if not column.number]
        rows = [[text.replace("|", "\\|") for text in row] for row in self.texts]
        return table(rows, self.titles, left)

    def latex(self) -> str:
        """As a LaTeX table with rules of the package booktabs."""
        align = ["right" if column.number else "left" for column in self.columns]
        rows = [[text.replace(MISSING, "--") for text in row] for row in self.texts]
        return tabulate.tabulate(
            rows, self.titles, tablefmt="latex_booktabs", colalign=align if rows else None, disable_numparse=True
        )

    def csv(self) -> str:
        """As CSV, numbers in full."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.titles)
        writer.writerows([one.full or one.key for one in row] for row in self.rows)
        return text.getvalue()

    def save(self, folder: Path) -> None:
        """Write all three files."""
        for suffix, text in (("csv", self.csv()), ("tex", self.latex() + "\n"), ("md", self.markdown() + "\n")):
            write_text(folder / f"{self.name}.{suffix}", text)
