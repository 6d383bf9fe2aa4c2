"""Tables for pdfLaTeX: no wider than the text, no higher than a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import tabulate

LINES = 40  # of a page
BROKEN = 40  # characters; a longer entry is broken into lines
PARAGRAPH = r">{\raggedright\arraybackslash}p{20em}"  # about as many characters
SHRUNK = r"\noindent\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"
COMMANDS = {  # for characters that pdfLaTeX lacks, and for a slash after which a line may end
    "/": r"\slash{}",
    "×": r"$\times$",
    "÷": r"$\div$",
    "≠": r"$\neq$",
    "≥": r"$\geq$",
    "∞": r"$\infty$",
    "α": r"$\alpha$",
    "…": r"\ldots{}",
    "–": "--",
    "−": "$-$",
    "“": "``",
    "”": "''",
}

Row = Sequence[str]


def latex(titles: Row, rows: Sequence[Row], numbers: Sequence[bool]) -> str:
    """Format a table for the packages array, booktabs and graphicx.

    Args:
        titles: The headings.
        rows: A text for each heading.
        numbers: Whether a column is aligned to the right.

    Returns:
        One tabular, or several with the same headings if the rows do not fit a page.
    """
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    align = [PARAGRAPH if width > BROKEN else "lr"[number] for width, number in zip(widths, numbers, strict=True)]
    return "\n\n".join(_tabular(titles, page, align) for page in _pages(rows))


def _pages(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Split rows into as many as fit a page; at least one page."""
    page: list[Row] = []
    lines = 0
    for row in rows:
        height = max(math.ceil(len(text) / BROKEN) for text in row)
        if page and lines + height > LINES:
            yield page
            page, lines = [], 0
        page.append(row)
        lines += height
    yield page


def _tabular(titles: Row, rows: Sequence[Row], align: Sequence[str]) -> str:
    """Format one tabular, shrunk if it is wider than the text."""
    sides = ["right" if one == "r" else "left" for one in align] if rows else None
    text = tabulate.tabulate(rows, titles, tablefmt="latex_booktabs", colalign=sides, disable_numparse=True)
    for character, command in COMMANDS.items():
        text = text.replace(character, command)
    _, _, body = text.partition("\n")
    return f"{SHRUNK}\n\\begin{{tabular}}{{{''.join(align)}}}\n{body}%\n}}%"
