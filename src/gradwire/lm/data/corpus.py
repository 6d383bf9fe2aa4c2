"""The corpus: a JSON array (or ``.jsonl``) of documents, streamed and validated while it is read or written.

A document is an object with ``id`` (a string or a number; default: ``sample_<index>``), ``title`` and ``text``. Instead
of ``text`` it may have ``prompt`` and ``completion``, or ``messages`` (a list of ``role`` and ``content``): then only
the completion, or the assistant's messages are to be predicted. ``target_spans`` name such characters of a ``text``.
``weight``, also of a message, and ``target_weights``, one per span, multiply the loss of what is predicted.
Positions in messages count from 0, as in ``sample_<index>``.
"""

from __future__ import annotations

import io
import json
import math
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from importlib.metadata import entry_points
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import ijson

from gradwire.base.errors import BadInput
from gradwire.base.files import check_regular, sha256_file, whole
from gradwire.lm.data import targets
from gradwire.lm.data.chats import PLAIN, Format
from gradwire.lm.data.targets import Content, Spans, Weights

C_BACKEND = "yajl2_c"
ID_GROUP = "gradwire.sample_ids"
SHOWN = 20  # problems that a report describes
CONTENT = ("text", "target_spans", "target_weights", "prompt", "completion", "messages", "weight")
IdOf: TypeAlias = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
        id: Never empty.
        title: May be empty.
        body: Its text.
        spans: The characters of ``body`` that are targets; None: all of ``text``.
        weights: What the loss of each span's tokens, or of all of ``text``, is multiplied by; None: 1.
        templated: Whether ``body`` is a chat in the form of a chat template (`targets.Content`).
        given: The object that the document was read from.
        position: Its number in the corpus, from 0.
    """

    id: str
    title: str
    body: str
    spans: Spans | None = None
    weights: Weights | None = None
    templated: bool = False
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    position: int = field(default=0, compare=False)

    @property
    def is_chat(self) -> bool:
        """Whether the content is given as messages."""
        return self.given.get("text") is None and self.given.get("messages") is not None

    @property
    def text(self) -> str:
        """The model's input: the title, a line break, the body; the body alone if only parts of it are targets."""
        return f"{self.title}\n{self.body}" if self.spans is None else self.body


class Written(NamedTuple):
    """Counts of what ``write`` wrote, and whether ``max_bytes`` cut it off before the last document."""

    documents: int
    bytes: int
    cut: bool


class Problem(NamedTuple):
    """Why a document is invalid.

    Attributes:
        position: The document's number, from 0.
        id: Its id, if it states one.
        reason: A predicate, such as ``has no text``.
    """

    position: int
    id: str | None
    reason: str

    def described(self, line: int | None = None) -> str:
        """Return a clause: the document, with its line if that is known, and what is wrong."""
        known = [*([f"line {line}"] if line else []), *([f"id {self.id!r}"] if self.id else [])]
        return f"document {self.position} (counted from 0{''.join(f', {each}' for each in known)}) {self.reason}"


class Invalid:
    """The invalid documents of a corpus file: their number, and the problems of the first ones."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[Problem] = []

    def add(self, problem: Problem) -> None:
        """Count a document."""
        self.count += 1
        if len(self._first) < SHOWN:
            self._first.append(problem)

    def report(self, path: Path) -> str:
        """Describe the documents, with their lines in a file of lines: one in a clause, several in a list."""
        lines = _lines_of(path, [problem.position for problem in self._first])
        shown = [problem.described(lines.get(problem.position)) for problem in self._first]
        if self.count == 1:
            return f"{path}: {shown[0]}"
        more = [f"and {self.count - len(shown):,} more"] if self.count > len(shown) else []
        return "\n  ".join([f"{path}: {self.count:,} documents are invalid:", *shown, *more])


class Object(dict[str, Any]):
    """A decoded JSON object that records a duplicate key; an exception would not pass through ijson."""

    twice: str | None = None

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a key; record it if it was set before."""
        if key in self:
            self.twice = key
        super().__setitem__(key, value)


class FirstSeen:
    """The first position of each key, for any number of keys: a temporary SQLite table, on disk if it is large."""

    def __init__(self) -> None:
        # The tokenizer's trainer reads documents from several threads, but never from two at once.
        self._table = sqlite3.connect("", check_same_thread=False)
        self._table.execute("PRAGMA cache_size = -32768")  # KiB kept in memory
        self._table.execute("CREATE TABLE seen (key TEXT PRIMARY KEY, position INTEGER) WITHOUT ROWID")
        self._table.execute("BEGIN")

    def add(self, key: str, position: int) -> int | None:
        """Record ``key``; return its first position if it was added before."""
        try:
            self._table.execute("INSERT INTO seen VALUES (?, ?)", (key, position))
        except sqlite3.IntegrityError:
            return self._table.execute("SELECT position FROM seen WHERE key = ?", (key,)).fetchone()[0]
        return None


def documents(
    path: Path, id_from: str | None = None, chats: Format = PLAIN, skipped: Invalid | None = None
) -> Iterator[Document]:
    """Yield the documents of a corpus file, in order; memory use does not depend on the size of the file.

    Args:
        path: The file.
        id_from: Source of the ids (`ids_from`); default: the key ``id``.
        chats: Format of chats.
        skipped: Gets the invalid documents, which are left out; None: they are an error, which describes them all.

    Raises:
        BadInput: If the file is missing, not JSON in UTF-8, UTF-16 or UTF-32, not an array (``.jsonl``: not objects)
            or empty, or a document is invalid as in ``parse``; with ``skipped``, if all are.
    """
    path, invalid = Path(path), Invalid() if skipped is None else skipped
    return _reported(parse(_values(path), str(path), id_from, chats, invalid), path, invalid, skipped is not None)


def checked(
    path: Path, id_from: str | None = None, chats: Format = PLAIN, skipped: Invalid | None = None
) -> Iterator[Document]:
    """Yield the documents of a corpus file, as ``documents`` does; a repeated id is invalid, too."""
    path, invalid = Path(path), Invalid() if skipped is None else skipped
    parsed = parse(_values(path), str(path), id_from, chats, invalid)
    return _reported(distinct(parsed, str(path), invalid), path, invalid, skipped is not None)


def _reported(documents: Iterable[Document], path: Path, invalid: Invalid, skip: bool) -> Iterator[Document]:
    """Yield the valid documents; without ``skip``, those before the first invalid one, and read on for the report.

    Raises:
        BadInput: If a document is invalid; with ``skip``, if all are.
    """
    some = False
    for document in documents:
        if skip or not invalid.count:
            yield document
            some = True
    if invalid.count and not (skip and some):
        advice = "" if skip else "\nCorrect or remove them, or leave them out by --skip_invalid."
        raise BadInput(invalid.report(path) + ("." if invalid.count == 1 else advice))


def _lines_of(path: Path, positions: Collection[int]) -> dict[int, int]:
    """Return the lines, from 1, of documents by position, if each has a line: in a ``.jsonl``."""
    if path.suffix != ".jsonl":
        return {}
    with path.open("rb") as file:
        encoding = json.detect_encoding(file.read(4))
    with path.open(encoding=encoding, errors="replace", newline="\n") as stream:
        filled = (number for number, line in enumerate(stream, 1) if line.strip())
        first = islice(filled, max(positions) + 1)
        return {position: line for position, line in enumerate(first) if position in positions}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a corpus file.

    Raises:
        BadInput: If it cannot be read.
    """
    check_regular(path)
    try:
        return sha256_file(path)
    except OSError as error:
        raise BadInput(f"cannot read the corpus {path}: {error.strerror}.") from None


def parse(
    values: Iterable[Any],
    where: str,
    id_from: str | None = None,
    chats: Format = PLAIN,
    invalid: Invalid | None = None,
) -> Iterator[Document]:
    """Turn decoded JSON objects into documents.

    Args:
        values: Mappings with ``text``, ``prompt`` and ``completion``, or ``messages``; optionally ``id``, ``title``.
        where: Origin of the values, for messages.
        id_from: Source of the ids, as in ``documents``.
        chats: Format of chats.
        invalid: Gets the invalid documents, which are left out; None: the first is an error.

    Raises:
        BadInput: If there are no documents, or one has no text, an invalid id or title, or half of a surrogate pair.
    """
    position, id_of = -1, ids_from(id_from)
    for position, value in enumerate(values):
        try:
            document = _document(value, position, id_of, chats)
        except ValueError as error:
            stated = value.get("id") if isinstance(value, dict) else None
            _note(Problem(position, stated if isinstance(stated, str) else None, str(error)), where, invalid)
        else:
            yield document
    if position < 0:
        raise BadInput(f"{where} contains no documents.")


def distinct(documents: Iterable[Document], where: str, invalid: Invalid | None = None) -> Iterator[Document]:
    """Yield the documents and check that their ids are unique.

    Args:
        documents: The documents.
        where: Their origin, for messages.
        invalid: As for ``parse``.

    Raises:
        BadInput: If two documents share an id; the message names their positions.
    """
    seen = FirstSeen()
    for document in documents:
        first = seen.add(document.id, document.position)
        if first is None:
            yield document
        else:
            reason = f"has the id of document {first}; ids must be unique, because they identify gradients"
            _note(Problem(document.position, document.id, reason), where, invalid)


def _note(problem: Problem, where: str, invalid: Invalid | None) -> None:
    """Count a problem; raise it if problems are not counted."""
    if invalid is None:
        raise BadInput(f"{where}: {problem.described()}.")
    invalid.add(problem)


def write(path: Path, documents: Iterable[Document], max_bytes: int | None = None) -> Written:
    """Write documents atomically as a JSON array, one per line.

    Args:
        path: The file to write.
        documents: The documents; read only as far as needed.
        max_bytes: Maximum size of the file; the first document that would exceed it ends the file.

    Raises:
        BadInput: If no document fits.
    """
    count, size, cut = 0, len("[\n\n]\n"), False
    with whole(path) as part, part.open("wb") as stream:
        for document in documents:
            value = {"id": document.id, **content(document)}
            line = (",\n" if count else "[\n").encode() + json.dumps(value, ensure_ascii=False).encode()
            if max_bytes is not None and size + len(line) > max_bytes:
                cut = True
                break
            stream.write(line)
            count, size = count + 1, size + len(line)
        if not count:
            raise BadInput(f"{path}: no document fits into {max_bytes} bytes; raise --max_mb.")
        stream.write(b"\n]\n")
    return Written(count, path.stat().st_size, cut)


def content(document: Document) -> dict[str, Any]:
    """Return a document as an object of a corpus file, but for its id: its content in the form that it was given in."""
    given = {key: plain(document.given[key]) for key in CONTENT if document.given.get(key) is not None}
    return {"title": document.title, **given}


def plain(value: Any) -> Any:
    """Return a decoded JSON value with floats instead of decimal numbers."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return float(value) if isinstance(value, Decimal) else value


def _document(value: Any, position: int, id_of: IdOf, chats: Format) -> Document:
    """Read a decoded JSON value.

    Raises:
        ValueError: If it is not a valid document; the message is a predicate.
    """
    if not isinstance(value, dict):
        raise ValueError(f"is {_kind(value)}, not an object with id, title and text")
    if isinstance(value, Object) and value.twice is not None:
        raise ValueError(f"has the key {value.twice!r} twice")
    title = "" if value.get("title") is None else value["title"]
    if not isinstance(title, str):
        raise ValueError(f"has {_kind(title)} as title; it must be a string")
    read = _content(value, chats)
    weights = targets.weights_of(value, read)
    id_ = _document_id(id_of(value), position)
    for part in (id_, title, read.text):
        try:
            part.encode()
        except UnicodeEncodeError as error:
            half = ascii(part[error.start])
            raise ValueError(f"has {half}, half of a surrogate pair: write the whole character, or remove it") from None
    return Document(id_, title, read.text, read.spans, weights, read.templated, value, position)


def _content(value: Mapping[str, Any], chats: Format) -> Content:
    """The text of a document and its targets; ``text`` comes before other forms."""
    body = value.get("text")
    if isinstance(body, str) and body.strip():
        return Content(body) if value.get("target_spans") is None else targets.of_spans(body, value["target_spans"])
    chat, pair = value.get("messages") is not None, {"prompt", "completion"} & value.keys()
    if body is not None or not (chat or pair):
        raise ValueError(
            "has no text: add a non-empty string 'text', or 'prompt' and 'completion', or 'messages', or remove the "
            "document"
        )
    if chat and pair:
        raise ValueError("has both 'messages' and 'prompt' or 'completion': keep one form")
    return chats.read(targets.messages_of(value)) if chat else targets.of_completion(value)


def _document_id(value: Any, position: int) -> str:
    if value is None:
        return f"sample_{position}"
    if isinstance(value, str) and value:
        return value
    if isinstance(value, float) and math.isfinite(value):
        value = Decimal(repr(value))
    if isinstance(value, Decimal) and abs(value.adjusted()) > LONGEST_NUMBER:
        raise ValueError(f"has {value} as id, a number of more than {LONGEST_NUMBER} digits: write it as a string")
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return format(value, "f") if isinstance(value, Decimal) else str(value)
    raise ValueError(f"has {json.dumps(value, default=str)} as id; it must be a non-empty string or a number")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _values(path: Path) -> Iterator[Any]:
    if ijson.backend != C_BACKEND:
        raise BadInput(
            f"ijson uses its slow backend {ijson.backend!r}; unset IJSON_BACKEND and install an ijson wheel, "
            f"which includes {C_BACKEND!r}."
        )
    lines = path.suffix == ".jsonl"
    position = 0
    check_regular(path)
    try:
        with path.open("rb") as file:
            stream = Checked(file)
            _check_first(stream.first(), path, lines)
            for value in ijson.items(stream, "" if lines else "item", multiple_values=lines, map_type=Object):
                yield value
                position += 1
    except OSError as error:
        raise BadInput(f"cannot read the corpus {path}: {error.strerror}.") from None
    except Unfit as error:
        raise BadInput(f"{path}: document {position} (counted from 0) has {error}.") from None
    except InvalidOperation:
        raise BadInput(f"{path}: document {position} (counted from 0) has a number of too large an exponent.") from None
    except (ijson.JSONError, UnicodeDecodeError) as error:
        line = _lines_of(path, [position]).get(position)
        raise BadInput(
            f"{path} is not valid JSON in Unicode: {_reason(error)} in document {position} (counted from 0"
            f"{f', line {line}' if line else ''}) or directly before it. Is the file complete?"
        ) from None


def _check_first(first: bytes, path: Path, lines: bool) -> None:
    if not first:
        raise BadInput(
            f"{path} is empty: a corpus is a JSON array of objects with id, title and text, or has one in each line "
            "(.jsonl)."
        )
    if first != b"[" and not lines:
        raise BadInput(
            f"{path} is not a JSON array (it starts with {first.decode(errors='replace')!r}): a corpus is an array "
            "of objects with id, title and text; a file with one object per line must be named .jsonl."
        )


def _reason(error: Exception) -> str:
    """The first line of the parser's message; it is bytes, and the other lines show the position."""
    message = error.args[0] if isinstance(error, ijson.JSONError) else str(error)
    text = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
    return text.splitlines()[0].rstrip(".")


def ids_from(name: str | None) -> IdOf:
    """Return the function that gives a document's id.

    Args:
        name: A key of the document, or an entry point of the group ``gradwire.sample_ids``: a function that takes the
            document, a mapping, and returns its id. None: the key ``id``.

    Raises:
        BadInput: If the function cannot be loaded.
    """
    key = name or "id"
    for entry in entry_points(group=ID_GROUP):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as error:
                raise BadInput(f"the id extractor {name} ({entry.value}) cannot be loaded: {error!r}") from error
    return lambda document: document.get(key)


# ijson turns half of a surrogate pair into "?" or joins it with the next character, an integer of more digits than
# Python converts ends the process, and deep nesting takes memory by the square of the depth: `Checked` refuses these.
PIECE = 65_536  # bytes read at once
LONGEST_NUMBER = 4300  # digits that Python converts to an integer
DEEPEST = 1000  # arrays and objects in one another

DIGITS, SPACES, QUOTE, BACKSLASH = b"0123456789", b" \t\r\n", b'"', ord("\\")
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (LONGEST_NUMBER + 1))
PAIRED = re.compile(rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+", re.S)


class Unfit(ValueError):
    """Bytes that are refused; the message goes after the words "document 3 has"."""


class Checked:
    """A stream that ijson reads: the bytes of a JSON file in UTF-8, whatever Unicode encoding the file has.

    Everything before a fault is given out first, so the reader knows in which document the fault is.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._pieces: Iterator[bytes] = filter(None, _checked(_in_utf8(stream)))

    def read(self, size: int) -> bytes:
        """Return the next bytes, of any number; none at the end, or if ``size`` is 0.

        Raises:
            Unfit: If the file holds half of a surrogate pair, a number of more than ``LONGEST_NUMBER`` digits, or more
                than ``DEEPEST`` nested values.
            UnicodeDecodeError: If it is not in the encoding that it begins in.
        """
        return next(self._pieces, b"") if size else b""

    def first(self) -> bytes:
        """Return the first byte that is not white space, and keep all for `read`; none in a blank file."""
        for piece in self._pieces:
            if start := piece.lstrip(SPACES):
                self._pieces = chain([piece], self._pieces)
                return start[:1]
        return b""


# Why: docs/decisions.md, "A check in front of ijson".
def _in_utf8(stream: BinaryIO) -> Callable[[int], bytes]:
    """Return the function that reads on, without a byte order mark."""
    encoding = json.detect_encoding(stream.read(4))
    stream.seek(3 if encoding == "utf-8-sig" else 0)
    if encoding.startswith("utf-8"):
        return stream.read
    text = io.TextIOWrapper(stream, encoding, newline="")
    return lambda size: text.read(size).encode()


def _checked(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield strings and what is between them; errors as in `Checked.read`."""
    data, depth = b"", 0
    while more := read(max(PIECE, len(data))):
        data, end = data + more, 0
        while (opening := data.find(QUOTE, end)) >= 0 and (closing := _closing(data, opening + 1)) >= 0:
            depth = _checked_depth(data[end:opening], depth)
            yield data[end:opening]
            _check_pairs(data[opening + 1 : closing])
            yield data[opening : closing + 1]
            end = closing + 1
        data = data[end:]
        if opening < 0:
            between = data.rstrip(DIGITS)
            depth = _checked_depth(between, depth)
            yield between
            data = data[len(between) :]
            _check_number(data)
    yield data


def _closing(data: bytes, start: int) -> int:
    """The quote that ends the string from ``start``; -1 if it is not in the data."""
    quote = data.find(QUOTE, start)
    while quote >= 0:
        first = quote
        while first > start and data[first - 1] == BACKSLASH:
            first -= 1
        if (quote - first) % 2 == 0:
            break
        quote = data.find(QUOTE, quote + 1)
    return quote


def _checked_depth(between: bytes, depth: int) -> int:
    """Check what is between two strings; return how many arrays and objects are open after it."""
    _check_number(between)
    for bracket in between.translate(None, NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise Unfit(f"more than {DEEPEST} values in one another")
    return depth


def _check_number(between: bytes) -> None:
    if len(between) > LONGEST_NUMBER and LONG_NUMBER.search(between):
        raise Unfit(f"a number of more than {LONGEST_NUMBER} digits: write it as a string, or remove it")


def _check_pairs(string: bytes) -> None:
    if b"\\ud" in string or b"\\uD" in string:
        end = PAIRED.match(string).end()  # type: ignore[union-attr]
        if end < len(string):
            half = string[end : end + 6].decode(errors="replace")
            raise Unfit(f"{half}, half of a surrogate pair: write the whole character, or remove it")
