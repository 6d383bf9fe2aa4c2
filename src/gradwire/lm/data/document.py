"""Documents of a corpus: their form, and the check of each one.

A document is an object with ``id`` (a string or a number; default: ``sample_<index>``), ``title`` and ``text``. Instead
of ``text`` it may have ``prompt`` and ``completion``, or ``messages`` (a list of ``role`` and ``content``): then only
the completion, or the assistant's messages are to be predicted. ``target_spans`` name such characters of a ``text``.
Positions in messages count from 0, as in ``sample_<index>``.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from gradwire.base.errors import BadInput
from gradwire.base.plugins import entry_points
from gradwire.lm.data.chats import ASSISTANT, PLAIN, Content, Format, Spans, answers

ID_GROUP = "gradwire.sample_ids"
SHOWN = 20  # problems that a report describes
MOST_DIGITS = 4300  # of a number that is an id, as of an integer that Python reads
CONTENT = ("text", "target_spans", "prompt", "completion", "messages")
WEIGHTS = ("weight", "target_weights")  # of a document or a message, which version 0.1.0 multiplied the loss by
IdOf: TypeAlias = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
        id: Never empty.
        title: May be empty.
        body: Its text.
        spans: The characters of ``body`` that are targets; None: all of ``text``.
        templated: Whether ``body`` is a chat in the form of a chat template (`chats.Content`).
        given: The object that the document was read from.
        position: Its number in the corpus, from 0.
    """

    id: str
    title: str
    body: str
    spans: Spans | None = None
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

    def described(self) -> str:
        """Return a clause: the document, and what is wrong."""
        return f"document {self.position} (counted from 0{f', id {self.id!r}' if self.id else ''}) {self.reason}"


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
        """Describe the documents: one in a clause, several in a list."""
        shown = [problem.described() for problem in self._first]
        if self.count == 1:
            return f"{path}: {shown[0]}"
        more = [f"and {self.count - len(shown):,} more"] if self.count > len(shown) else []
        return "\n  ".join([f"{path}: {self.count:,} documents are invalid:", *shown, *more])


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
        id_from: Source of the ids, as in `ids_from`.
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


def _document(value: Any, position: int, id_of: IdOf, chats: Format) -> Document:
    """Read a decoded JSON value.

    Raises:
        ValueError: If it is not a valid document; the message is a predicate.
    """
    if not isinstance(value, dict):
        raise ValueError(f"is {_kind(value)}, not an object with id, title and text")
    if weighted := _weighted(value):
        raise ValueError(f"has a {weighted!r}, which the loss does not use any more: remove it")
    title = "" if value.get("title") is None else value["title"]
    if not isinstance(title, str):
        raise ValueError(f"has {_kind(title)} as title; it must be a string")
    read = _content(value, chats)
    id_ = _document_id(id_of(value), position)
    for part in (id_, title, read.text):
        try:
            part.encode()
        except UnicodeEncodeError as error:
            half = ascii(part[error.start])
            raise ValueError(f"has {half}, half of a surrogate pair: write the whole character, or remove it") from None
    return Document(id_, title, read.text, read.spans, read.templated, value, position)


def _weighted(value: Mapping[str, Any]) -> str | None:
    """The key of a document, or of one of its messages, that has a weight other than 1."""
    messages = value.get("messages")
    entries = [value, *(entry for entry in (messages if isinstance(messages, list) else ()) if isinstance(entry, dict))]
    return next((key for entry in entries for key in WEIGHTS if entry.get(key) not in (None, 1)), None)


def _content(value: Mapping[str, Any], chats: Format) -> Content:
    """The text of a document and its targets; ``text`` comes before other forms."""
    body = value.get("text")
    if isinstance(body, str) and body.strip():
        return Content(body) if value.get("target_spans") is None else of_spans(body, value["target_spans"])
    chat, pair = value.get("messages") is not None, {"prompt", "completion"} & value.keys()
    if body is not None or not (chat or pair):
        raise ValueError(
            "has no text: add a non-empty string 'text', or 'prompt' and 'completion', or 'messages', or remove the "
            "document"
        )
    if chat and pair:
        raise ValueError("has both 'messages' and 'prompt' or 'completion': keep one form")
    return chats.read(messages_of(value)) if chat else of_completion(value)


def of_completion(value: Mapping[str, Any]) -> Content:
    """Return the text of a prompt and its completion, one directly after the other; the completion is the target.

    Raises:
        ValueError: If one of them is not a string, or the completion is blank.
    """
    for key in ("prompt", "completion"):
        if not isinstance(value.get(key), str):
            raise ValueError(f"needs a string {key!r} as well as the other of 'prompt' and 'completion'")
    prompt, completion = value["prompt"], value["completion"]
    if not completion.strip():
        raise ValueError("has a blank completion and so nothing to learn: remove it")
    return Content(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))


def messages_of(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat, without entries that are null.

    Raises:
        ValueError: If they are not a list of objects with a string role and content, or the assistant says nothing.
    """
    messages = value["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("needs 'messages' that are a list of objects with 'role' and 'content'")
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"has a message {number} (counted from 0) whose role or content is not a string")
    if not answers(messages):
        empty = next((number for number, message in enumerate(messages) if message["role"] == ASSISTANT), None)
        wrong = f"no message of the {ASSISTANT}" if empty is None else f"an empty message {empty} of the {ASSISTANT}"
        raise ValueError(f"has {wrong} and so nothing to learn: remove it")
    return [{key: entry for key, entry in message.items() if entry is not None} for message in messages]


def of_spans(text: str, given: Any) -> Content:
    """Return a text with the targets that its document states.

    Raises:
        ValueError: If they are not ranges of the text's characters, in order and without overlap.
    """
    pairs = isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given)
    edges = [edge for pair in given for edge in pair] if pairs else []
    if not edges or any(type(edge) is not int for edge in edges):
        raise ValueError("needs 'target_spans' that are a list of [start, end] in characters of 'text'")
    ordered = edges == sorted(edges) and all(start < end for start, end in given)
    if not ordered or edges[0] < 0 or edges[-1] > len(text):
        raise ValueError(f"has 'target_spans' that overlap, are empty, or leave its text of {len(text)} characters")
    return Content(text, tuple((start, end) for start, end in given))


def _document_id(value: Any, position: int) -> str:
    if value is None:
        return f"sample_{position}"
    if isinstance(value, str) and value:
        return value
    if isinstance(value, float) and math.isfinite(value):
        value = Decimal(repr(value))
    if isinstance(value, Decimal) and abs(value.adjusted()) > MOST_DIGITS:
        raise ValueError(f"has a number of more than {MOST_DIGITS} digits as id; write it as a string")
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return format(value, "f") if isinstance(value, Decimal) else str(value)
    given = _kind(value) if isinstance(value, list | dict) else json.dumps(value)
    raise ValueError(f"has {given} as id; it must be a non-empty string or a number")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def ids_from(name: str | None) -> IdOf:
    """Return the function that gives a document's id.

    Args:
        name: A key of the document, or an entry point of the group ``gradwire.sample_ids``: a function that takes the
            document, a mapping, and returns its id. None: the key ``id``.

    Raises:
        BadInput: If the function cannot be loaded.
    """
    key = name or "id"
    for entry in entry_points(ID_GROUP):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as error:
                raise BadInput(f"the id extractor {name} ({entry.value}) cannot be loaded: {error!r}") from error
    return lambda document: document.get(key)


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


def missing(value: Mapping[str, Any]) -> str | None:
    """Return what a document lacks to be of use: ``text``, ``completion``, or an ``answer`` in its messages."""
    for key in ("text", "completion"):
        if key in value and (value[key] is None or _blank(value[key])):
            return key
    return "answer" if "messages" in value and not _answered(value["messages"]) else None


def _answered(chat: Any) -> bool:
    """Whether a chat has a message of the assistant, or is malformed, which `messages_of` reports."""
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        return chat is not None
    return any(message.get("role") == ASSISTANT and not _blank(message.get("content")) for message in chat)


def _blank(text: Any) -> bool:
    return isinstance(text, str) and not text.strip()
