"""Titles of texts, and texts split at their headings: Markdown, reStructuredText and HTML, by the standard library."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from typing import NamedTuple

FENCE = re.compile(r" {0,3}(```|~~~)")
ATX = re.compile(r" {0,3}#{1,6}(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$")  # Markdown's "## Heading ##"
SETEXT = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")  # Markdown's line below a heading
ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1+[ \t]*$")  # reStructuredText's line below, and above, a heading

CODE = {"script", "style"}  # which no browser shows, closed or not
SKIPPED = {*CODE, "template", "noscript", "svg", "nav", "footer"}
BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "br", "caption", "dd", "details", "div", "dl", "dt"),
    *("fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "head", "header"),
    *("hr", "li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "title", "tr", "ul"),
}
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}


class Block(NamedTuple):
    """Some lines of a text.

    Attributes:
        line: The number of the first one in the file, from 1.
        text: The lines, without the last line break.
        title: The heading that they are, or None for other text.
    """

    line: int
    text: str
    title: str | None = None


class Section(NamedTuple):
    """A part of a text: its first line's number, its title ("" without a heading), and the text without it."""

    line: int
    title: str
    body: str


def blocks(text: str, form: str) -> list[Block]:
    """Cut a text into lines; a heading is one block with the lines that mark it.

    Args:
        text: The text.
        form: ``text``, which has no headings, ``markdown``, ``rst`` or ``html``, whose markup is removed.
    """
    if form == "html":
        read = Html(text, SKIPPED)
        return Html(text, SKIPPED - unclosed).blocks if (unclosed := {*+read.open} - CODE) else read.blocks
    lines = text.split("\n")
    cut = {"markdown": _markdown, "rst": _rst}.get(form)
    return list(cut(lines)) if cut else [Block(number, line) for number, line in enumerate(lines, 1)]


def whole(text: str, form: str) -> Iterator[Section]:
    """Yield the text as one section; a heading that begins it becomes the title. Nothing is yielded for blank text."""
    lines = [*blocks(text, form)]
    while lines and not lines[0].text.strip():
        del lines[0]
    if lines and lines[0].title is not None and (body := _joined(lines[1:])).strip():
        yield Section(1, lines[0].title, body)
    elif lines:
        yield Section(1, "", _joined(lines))


def split(text: str, form: str) -> Iterator[Section]:
    """Yield the sections of a text: from each heading to the next; no text is lost.

    A heading without text before the next one is joined to that one's title: ``Chapter / Section``. Nothing is yielded
    for blank text.
    """
    lines = blocks(text, form)
    starts = sorted({0, len(lines), *(position for position, block in enumerate(lines) if block.title is not None)})
    waiting: list[Block] = []  # headings without text
    for start, end in pairwise(starts):
        head = [lines[start]] if lines[start].title is not None else []
        body = _joined(lines[start + len(head) : end])
        waiting += head
        if body.strip():
            yield Section((waiting or lines[start:])[0].line, " / ".join(b.title or "" for b in waiting), body)
            waiting = []
    if waiting:
        yield Section(waiting[0].line, "", _joined(waiting))


def _joined(lines: list[Block]) -> str:
    return "\n".join(block.text for block in lines).strip("\n")


def _markdown(lines: list[str]) -> Iterator[Block]:
    fenced, position = False, 0
    while position < len(lines):
        line, below = lines[position], lines[position + 1] if position + 1 < len(lines) else ""
        fenced ^= FENCE.match(line) is not None
        heading = None if fenced else ATX.match(line)
        if heading and heading[1]:
            yield Block(position + 1, line, heading[1].strip())
        elif not fenced and line.strip() and SETEXT.match(below) and not SETEXT.match(line):
            yield Block(position + 1, f"{line}\n{below}", line.strip())
            position += 1
        else:
            yield Block(position + 1, line)
        position += 1


def _rst(lines: list[str]) -> Iterator[Block]:
    position = 0
    while position < len(lines):
        above, title, below = [*lines[position : position + 3], "", ""][:3]
        after_blank = position == 0 or not lines[position - 1].strip()
        if after_blank and above == below and ADORNMENT.match(above) and _titled(title, below):
            yield Block(position + 1, f"{above}\n{title}\n{below}", title.strip())
            position += 3
        elif after_blank and not above.startswith((" ", "\t")) and _titled(above, title):
            yield Block(position + 1, f"{above}\n{title}", above.strip())
            position += 2
        else:
            yield Block(position + 1, above)
            position += 1


def _titled(title: str, adornment: str) -> bool:
    """Whether the second line marks the first one as a heading; it is as long, or docutils would warn."""
    marked = ADORNMENT.match(adornment) is not None and not ADORNMENT.match(title)
    return bool(title.strip()) and marked and len(adornment.rstrip()) >= len(title.strip())


class Html(HTMLParser):
    """The text of an HTML page in `blocks`, one per block of the page; whitespace as a browser shows it.

    Attributes:
        blocks: The text.
        open: How many of the skipped elements were not closed, by tag: the rest of the page was skipped.
    """

    def __init__(self, page: str, skipped: set[str]) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self.open: Counter[str] = Counter()
        self._skipped = skipped
        self._text: list[str] = []
        self._line = 1
        self._verbatim = 0  # depth inside preformatted elements
        self._heading = self._titled = False
        self.feed(page)
        self.close()
        self.end()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Start a block, or skip an element."""
        if tag in BLOCKS:
            self.end()
        self.open[tag] += tag in self._skipped
        self._verbatim += tag == "pre"
        self._heading = tag in HEADINGS if tag in BLOCKS else self._heading
        self._titled = tag == "title" if tag in BLOCKS else self._titled

    def handle_endtag(self, tag: str) -> None:
        """End a block, or an element that is skipped."""
        if tag in BLOCKS:
            self.end()
            self._heading = self._titled = False
        self.open[tag] = max(0, self.open[tag] - 1)
        self._verbatim = max(0, self._verbatim - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        """Take text; the page's title repeats its first heading, so it is left out."""
        if self.open.total() or self._titled:
            return
        if not self._text:
            self._line = self.getpos()[0]
        self._text.append(data)

    def end(self) -> None:
        """End the current block."""
        joined, self._text = "".join(self._text), []
        text = joined.strip("\n") if self._verbatim else " ".join(joined.split())
        if text.strip():
            self.blocks.append(Block(self._line, text, text if self._heading else None))
