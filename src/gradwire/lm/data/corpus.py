"""The corpus: a JSON array (or ``.jsonl``) of documents, streamed and validated while it is read or written.

A document is an object with ``id`` (a string or a number; default: ``sample_<index>``), ``title`` and ``text``. Instead
of ``text`` it may have ``prompt`` and ``completion``, or ``messages`` (a list of ``role`` and ``content``): then only
the completion, or the assistant's messages are to be predicted. ``target_spans`` name such characters of a ``text``.
``weight``, also of a message, and ``target_weights``, one per span, multiply the loss of what is predicted.
Positions in messages count from 0, as in ``sample_<index>``.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ijson

from gradwire.base.errors import BadInput
from gradwire.base.files import check_regular, sha256_file, whole
from gradwire.lm.data import targets
from gradwire.lm.data.json_bytes import LONGEST_NUMBER, Checked, Unfit
from gradwire.lm.data.targets import Spans, Weights

C_BACKEND = "yajl2_c"
ID_GROUP = "gradwire.sample_ids"
IdOf: TypeAlias = Callable[[Mapping[str, Any]], Any]


class Document(NamedTuple):
    """One document.

    Attributes:
        id: Never empty.
        title: May be empty.
        body: Its text.
        spans: The characters of ``body`` that are targets; None: all of ``text``.
        weights: What the loss of each span's tokens, or of all of ``text``, is multiplied by; None: 1.
    """

    id: str
    title: str
    body: str
    spans: Spans | None = None
    weights: Weights | None = None

    @property
    def text(self) -> str:
        """The model's input: the title, a line break, the body; the body alone if only parts of it are targets."""
        return f"{self.title}\n{self.body}" if self.spans is None else self.body


class Written(NamedTuple):
    """Counts of what ``write`` wrote, and whether ``max_bytes`` cut it off before the last document."""

    documents: int
    bytes: int
    cut: bool


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


def documents(path: Path, id_from: str | None = None) -> Iterator[Document]:
    """Yield the documents of a corpus file, in order; memory use does not depend on the size of the file.

    Args:
        path: The file.
        id_from: Source of the ids (`ids_from`); default: the key ``id``.

    Raises:
        BadInput: If the file is missing, not JSON in UTF-8, UTF-16 or UTF-32, not an array (``.jsonl``: not objects)
            or empty, or a document is invalid as in ``parse``.
    """
    return parse(_values(Path(path)), str(path), id_from)


def checked(path: Path) -> Iterator[Document]:
    """Yield the documents of a corpus file and check that ids are unique; errors as in ``documents``, ``distinct``."""
    return distinct(documents(path), str(path))


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


def parse(values: Iterable[Any], where: str, id_from: str | None = None) -> Iterator[Document]:
    """Turn decoded JSON objects into documents.

    Args:
        values: Mappings with ``text``, ``prompt`` and ``completion``, or ``messages``; optionally ``id``, ``title``.
        where: Origin of the values, for messages.
        id_from: Source of the ids, as in ``documents``.

    Raises:
        BadInput: If there are no documents, or one has no text, an invalid id or title, or half of a surrogate pair.
    """
    position, id_of = -1, ids_from(id_from)
    for position, value in enumerate(values):
        yield _document(value, position, where, id_of)
    if position < 0:
        raise BadInput(f"{where} contains no documents.")


def distinct(documents: Iterable[Document], where: str) -> Iterator[Document]:
    """Yield the documents and check that their ids are unique.

    Raises:
        BadInput: If two documents share an id; the message names their positions.
    """
    seen = FirstSeen()
    for position, document in enumerate(documents):
        first = seen.add(document.id, position)
        if first is not None:
            raise BadInput(
                f"{where}: documents {first} and {position} (counted from 0) share the id {document.id!r}; "
                "ids must be unique, because they identify gradients."
            )
        yield document


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
    """Return a document as an object of a corpus file, but for its id."""
    keys: dict[str, Any] = {"title": document.title, "text": document.body}
    if document.spans is not None:
        keys["target_spans"] = document.spans
    if document.weights is not None:
        keys |= {"weight": document.weights[0]} if document.spans is None else {"target_weights": document.weights}
    return keys


def _document(value: Any, position: int, where: str, id_of: IdOf) -> Document:
    here = f"{where}: document {position} (counted from 0)"
    if not isinstance(value, dict):
        raise BadInput(f"{here} is {_kind(value)}, not an object with id, title and text.")
    title = "" if value.get("title") is None else value["title"]
    if not isinstance(title, str):
        raise BadInput(f"{here} has {_kind(title)} as title; it must be a string.")
    try:
        body, spans = _content(value)
        weights = targets.weights_of(value, spans)
    except ValueError as error:
        raise BadInput(f"{here} {error}.") from None
    id_ = _document_id(id_of(value), position, here)
    for part in (id_, title, body):
        try:
            part.encode()
        except UnicodeEncodeError as error:
            half = ascii(part[error.start])
            raise BadInput(
                f"{here} has {half}, half of a surrogate pair: write the whole character, or remove it."
            ) from None
    return Document(id_, title, body, spans, weights)


def _content(value: Mapping[str, Any]) -> tuple[str, Spans | None]:
    """The text of a document, and the characters that are targets (None: all); ``text`` comes before other forms."""
    body = value.get("text")
    if isinstance(body, str) and body.strip():
        return (body, None) if value.get("target_spans") is None else targets.of_spans(body, value["target_spans"])
    chat, pair = value.get("messages") is not None, {"prompt", "completion"} & value.keys()
    if body is not None or not (chat or pair):
        raise ValueError(
            "has no text: add a non-empty string 'text', or 'prompt' and 'completion', or 'messages', or remove the "
            "document"
        )
    if chat and pair:
        raise ValueError("has both 'messages' and 'prompt' or 'completion': keep one form")
    return targets.of_messages(value["messages"]) if chat else targets.of_completion(value)


def _document_id(value: Any, position: int, here: str) -> str:
    if value is None:
        return f"sample_{position}"
    if isinstance(value, str) and value:
        return value
    if isinstance(value, float) and math.isfinite(value):
        value = Decimal(repr(value))
    if isinstance(value, Decimal) and abs(value.adjusted()) > LONGEST_NUMBER:
        raise BadInput(
            f"{here} has {value} as id, a number of more than {LONGEST_NUMBER} digits: write it as a string."
        )
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return format(value, "f") if isinstance(value, Decimal) else str(value)
    raise BadInput(f"{here} has {json.dumps(value, default=str)} as id; it must be a non-empty string or a number.")


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
            if not lines:
                _require_array(stream.first(), path)
            for value in ijson.items(stream, "" if lines else "item", multiple_values=lines, map_type=Object):
                if isinstance(value, Object) and value.twice is not None:
                    raise BadInput(f"{path}: document {position} (counted from 0) has the key {value.twice!r} twice.")
                yield value
                position += 1
    except OSError as error:
        raise BadInput(f"cannot read the corpus {path}: {error.strerror}.") from None
    except Unfit as error:
        raise BadInput(f"{path}: document {position} (counted from 0) has {error}.") from None
    except InvalidOperation:
        raise BadInput(f"{path}: document {position} (counted from 0) has a number of too large an exponent.") from None
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path} is not valid JSON in Unicode: {_reason(error)} in document {position} (counted from 0) or "
            "directly before it. Is the file complete?"
        ) from None


def _require_array(first: bytes, path: Path) -> None:
    if not first:
        raise BadInput(f"{path} is empty: a corpus is a JSON array of objects with id, title and text.")
    if first != b"[":
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
