"""Markdown tables and number formats, used by all tables of the package."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import tabulate

from gradwire.bench.statistics.seeds import LEAST

MISSING = "–"
SPREAD = (
    f"“a … b” is the range of fewer than {LEAST} seeds, “[a, b]” Student's 95 % interval of the mean from {LEAST} on"
)
tabulate.MIN_PADDING = 0  # headers without padding, so that a dozen columns fit a terminal


def table(rows: Sequence[Sequence[str]], headers: Sequence[str], left: Container[int] = (0,)) -> str:
    """Format a table; columns ``left`` are aligned to the left, all others (numbers) to the right."""
    align = ["left" if column in left else "right" for column in range(len(headers))]
    return tabulate.tabulate(rows, headers, tablefmt="pipe", colalign=align if rows else None, disable_numparse=True)


def spread(n: int, low: float, high: float, form: str) -> str:
    """Format the spread of n seeds: a range ``a … b``, an interval ``[a, b]``, or a dash for one seed."""
    if math.isnan(low):
        return MISSING
    ends = form.format(low), form.format(high)
    return " … ".join(ends) if n < LEAST else f"[{', '.join(ends)}]"


def spread_title(ns: Iterable[int]) -> str:
    """The title for a column of spreads: ranges, intervals or both."""
    several = [n for n in ns if n > 1]
    kinds = {"range": any(n < LEAST for n in several) or not several, "95 %": any(n >= LEAST for n in several)}
    return ", ".join(kind for kind, holds in kinds.items() if holds)


def number(value: float | None, form: str) -> str:
    """Format a number; a dash for None and NaN."""
    return MISSING if value is None or math.isnan(value) else form.format(value)
