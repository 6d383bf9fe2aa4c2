"""Markdown tables and the numbers in them, as every table of the package writes them."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import tabulate

MISSING = "–"
tabulate.MIN_PADDING = 0  # headers no wider than their words: a dozen columns have to fit a terminal


def table(rows: Sequence[Sequence[str]], headers: Sequence[str], left: Container[int] = (0,)) -> str:
    """A table; the columns ``left`` stand to the left, all others are numbers and stand to the right."""
    align = ["left" if column in left else "right" for column in range(len(headers))]
    return tabulate.tabulate(rows, headers, tablefmt="pipe", colalign=align if rows else None, disable_numparse=True)


def number(value: float | None, form: str) -> str:
    """A number, or a dash for None and NaN."""
    return MISSING if value is None or math.isnan(value) else form.format(value)
