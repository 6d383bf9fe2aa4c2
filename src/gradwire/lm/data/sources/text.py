"""Text files: a folder, a glob or one file of text, Markdown, HTML or reStructuredText, also gzip or zstd.

Titles and headings are found by the standard library.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from gradwire.base.files import digest
from gradwire.lm.data import corpus, text_files
from gradwire.lm.data.sources import Source, Stream, folder_name, require_revision
from gradwire.lm.data.text_files import TextFile


def _known(encoding: str) -> str:
    known = text_files.encoding_of_text(encoding)
    if known is None:
        raise ValueError(f"Python knows no encoding of text {encoding!r}")
    return known


class Text(Source):
    """A folder, a glob or one file of text, Markdown, HTML or reStructuredText, also compressed (.gz, .zst).

    A document's id is the file's path below the folder, and with `split_at` headings also the line of the heading:
    ``guide/start.md:12``. Blank files are left out and counted, as are hidden ones and those of other endings in a
    folder. The revision is a digest of all files.
    """

    name = "text"

    data_path: Path = Field(description="a folder, a glob such as 'docs/**/*.rst.gz', or a file")
    split_at: Literal["files", "headings"] = Field(default="files", description="where a document ends")
    encoding: Annotated[str, AfterValidator(_known)] | None = Field(
        default=None, description="the files' encoding (None: detected for each file)"
    )

    def open(self) -> Stream:
        """Return the documents in the order of the files' paths."""
        files, metadata = text_files.find(self.data_path)
        where = str(self.data_path)
        revision = require_revision(where, self.revision, files_digest(files))
        return Stream(where, revision, corpus.parse(self._documents(files, metadata), where), metadata)

    def content(self) -> Any:
        """The digest of the files, and how they are read."""
        return [files_digest(text_files.find(self.data_path).files), self.split_at, self.encoding]

    @property
    def label(self) -> str:
        """The name of the folder or file."""
        return folder_name(self.data_path.name if self.data_path.exists() else "text")

    def _documents(self, files: list[TextFile], metadata: Counter[str]) -> Iterator[dict[str, str]]:
        cut = split if self.split_at == "headings" else whole
        for file in files:
            text, encoding = text_files.read(file.path, self.encoding)
            metadata["files"] += 1
            metadata[f"files_in_{encoding}"] += 1
            documents = list(cut(text, file.format))
            metadata["files_without_text"] += not documents
            for line, title, body in documents:
                id_ = f"{file.id}:{line}" if self.split_at == "headings" else file.id
                yield {"id": id_, "title": title or file.path.name, "text": body}


def files_digest(files: list[TextFile]) -> str:
    """A digest of the files' ids and bytes.

    Raises:
        BadInput: If a file cannot be read.
    """
    return digest([[file.id, corpus.sha256(file.path)] for file in files], length=64)


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
