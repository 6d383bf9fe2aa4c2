"""Tables of records: their columns, and their text as Markdown, LaTeX and CSV."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import tabulate

from gradwire.base.files import write_text
from gradwire.bench.statistics.seeds import LEAST

MISSING = "–"
SPREAD = (
    f"“a … b” is the range of fewer than {LEAST} seeds, “[a, b]” Student's 95 % interval of the mean from {LEAST} on"
)
KEYS = ("compressor", "strategy", "world_size", "link")  # fields that name a cell
tabulate.MIN_PADDING = 0  # headers without padding, so that a dozen columns fit a terminal

COMMANDS = {"≠": r"$\neq$", "≥": r"$\geq$", "∞": r"$\infty$", "α": r"$\alpha$", "−": r"$-$"}  # pdfLaTeX lacks these

Record = Mapping[Any, Any]
Row = Sequence[str]


def number(value: float | None, form: str) -> str:
    """Format a number; a dash for None and NaN."""
    return MISSING if value is None or math.isnan(value) else form.format(value)


def spread(n: int, low: float, high: float, form: str) -> str:
    """Format the spread of n seeds: a range ``a … b``, an interval ``[a, b]``, or a dash for one seed."""
    if math.isnan(low):
        return MISSING
    ends = form.format(low), form.format(high)
    return " … ".join(ends) if n < LEAST else f"[{', '.join(ends)}]"


def markdown(rows: Sequence[Row], headers: Row, left: Container[int] = (0,)) -> str:
    """Format a table as Markdown; columns ``left`` are aligned to the left, all others (numbers) to the right."""
    align = ["left" if column in left else "right" for column in range(len(headers))]
    return tabulate.tabulate(rows, headers, tablefmt="pipe", colalign=align if rows else None, disable_numparse=True)


class Entry(NamedTuple):
    """One entry of a table.

    Attributes:
        text: The text shown.
        value: The sort key, with all digits; None sorts first.
        full: The entry of the CSV file, if that is not the value.
        mark: The last part of the text, which a small screen can leave out.
    """

    text: str
    value: str | float | None = None
    full: str = ""
    mark: str = ""

    @property
    def key(self) -> str:
        """The value as text, or an empty text."""
        return "" if self.value is None else str(self.value)


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        title: Its heading; ``{spread}`` is replaced by "range", "95 %" or both.
        field: The field of a record that it shows. A spread also reads ``<field>_n``, ``_low`` and ``_high``.
        form: Format of its numbers; a column without a format holds text.
        unit: Text after each number.
        per: Divisor of the numbers.
        base: The compressor that others are compared with; it has a dash.
        against: The field of a record that has this compressor, if it is not the same for all.
        mark: The field whose text follows each entry, if any.
        ends: Whether it shows the spread over seeds, sorted by its lower end, instead of the value.
        number: Whether its entries are aligned to the right.
        hint: An explanation of the heading.
        long: Whether a short table, such as that of a paper, leaves it out.
    """

    title: str
    field: str
    form: str = ""
    unit: str = ""
    per: float = 1
    base: str = ""
    against: str = ""
    mark: str = ""
    ends: bool = False
    number: bool = True
    hint: str = ""
    long: bool = False

    def titled(self, title: str, **changes: Any) -> Column:
        """Copy the column with another title and other ``changes``."""
        return replace(self, title=title, **changes)

    def spread(self, title: str) -> Column:
        """The column of the spreads over seeds."""
        return replace(self, title=title, ends=True, mark="", hint="", long=True)

    def headed(self, records: Iterable[Record]) -> Column:
        """The column with its title for these records."""
        if not self.ends:
            return self
        several = [n for record in records if (n := record[f"{self.field}_n"]) > 1]
        kinds = {"range": any(n < LEAST for n in several) or not several, "95 %": any(n >= LEAST for n in several)}
        return self.titled(self.title.replace("{spread}", ", ".join(kind for kind, holds in kinds.items() if holds)))

    def entry(self, record: Record) -> Entry:
        """The record's entry; a dash if its number is None or NaN."""
        base = record[self.against] if self.against else self.base
        if base and record["compressor"] == base:
            return Entry(MISSING)
        if self.ends:
            n, low, high = (record[f"{self.field}_{end}"] for end in ("n", "low", "high"))
            text = spread(n, low, high, self.form)
            return Entry(text) if text == MISSING else Entry(text, low, spread(n, low, high, "{}"))
        value = record[self.field]
        mark = record[self.mark] if self.mark else ""
        if not self.form:
            return Entry(f"{value}{mark}", f"{value}{mark}", mark=mark) if mark else Entry(value, value)
        if value is None or math.isnan(value):
            return Entry(MISSING + mark)
        value = value / self.per if self.per != 1 else value
        return Entry(self.form.format(value) + self.unit + mark, value, mark=mark)


def text(title: str, field: str) -> Column:
    """A left-aligned column of text."""
    return Column(title, field, number=False)


def milliseconds(title: str, field: str) -> Column:
    """A column of times."""
    return Column(title, field, "{:,.1f}")


def megabytes(title: str, field: str, **more: Any) -> Column:
    """A column of bytes."""
    return Column(title, field, "{:,.3f}", per=1e6, **more)


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        name: The name of its files, without suffix.
        caption: A sentence about its contents.
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
        kept = [i for i in range(len(self.columns)) if any(row[i].text != MISSING for row in self.rows)]
        return replace(
            self, columns=[self.columns[i] for i in kept], rows=[[row[i] for i in kept] for row in self.rows]
        )

    @property
    def keys(self) -> int:
        """The number of first columns that name a row's cell."""
        keys = [column.field in KEYS for column in self.columns]
        return keys.index(False) if False in keys else len(keys)

    def markdown(self) -> str:
        """Format as Markdown."""
        left = [i for i, column in enumerate(self.columns) if not column.number]
        rows = [[entry.text.replace("|", "\\|") for entry in row] for row in self.rows]
        return markdown(rows, [column.title for column in self.columns], left)

    def latex(self) -> str:
        """Format as LaTeX for booktabs and longtable, without the columns that a short table leaves out."""
        kept = [i for i, column in enumerate(self.columns) if not column.long]
        frame = pd.DataFrame(
            [[row[i].text for i in kept] for row in self.rows], columns=[self.columns[i].title for i in kept]
        )
        align = "".join("lr"[self.columns[i].number] for i in kept)
        text = frame.to_latex(index=False, escape=True, column_format=align, longtable=True)
        for character, command in COMMANDS.items():
            text = text.replace(character, command)
        return text

    def csv(self) -> str:
        """Format as CSV, with all digits."""
        rows = [[entry.full or entry.key for entry in row] for row in self.rows]
        table = pd.DataFrame(rows, columns=[column.title for column in self.columns])
        return table.to_csv(index=False, lineterminator="\n")

    def save(self, folder: Path) -> None:
        """Write all three files."""
        for suffix, text in (("csv", self.csv()), ("tex", self.latex() + "\n"), ("md", self.markdown() + "\n")):
            write_text(folder / f"{self.name}.{suffix}", text)
