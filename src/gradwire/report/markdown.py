"""Markdown tables and the numbers in them, as every table of the package writes them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import tabulate

from gradwire.measurement.statistics import LEAST

MISSING = "–"
SPREAD = (
    f"“a … b” is the range of fewer than {LEAST} seeds, “[a, b]” Student's 95 % interval of the mean from {LEAST} on"
)
tabulate.MIN_PADDING = 0  # headers no wider than their words: a dozen columns have to fit a terminal


def table(rows: Sequence[Sequence[str]], headers: Sequence[str], left: Container[int] = (0,)) -> str:
    """A table; the columns ``left`` stand to the left, all others are numbers and stand to the right."""
    align = ["left" if column in left else "right" for column in range(len(headers))]
    return tabulate.tabulate(rows, headers, tablefmt="pipe", colalign=align if rows else None, disable_numparse=True)


def spread(n: int, low: float, high: float, form: str) -> str:
    """The spread of n seeds, a range as ``a … b``, an interval as ``[a, b]``; a dash where there is none."""
    if math.isnan(low):
        return MISSING
    ends = form.format(low), form.format(high)
    return " … ".join(ends) if n < LEAST else f"[{', '.join(ends)}]"


def spread_title(ns: Iterable[int]) -> str:
    """What a column of spreads holds: ranges, intervals or both."""
    several = [n for n in ns if n > 1]
    kinds = {"range": any(n < LEAST for n in several) or not several, "95 %": any(n >= LEAST for n in several)}
    return ", ".join(kind for kind, holds in kinds.items() if holds)


def number(value: float | None, form: str) -> str:
    """A number, or a dash for None and NaN."""
    return MISSING if value is None or math.isnan(value) else form.format(value)
