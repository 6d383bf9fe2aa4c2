"""A corpus file: a JSON array (or ``.jsonl``) of documents in UTF-8, streamed while it is read or written."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterable, Iterator
from decimal import InvalidOperation
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ijson

from gradwire.base.errors import BadInput
from gradwire.base.files import atomic_write, check_regular, sha256_file
from gradwire.lm.data.chats import PLAIN, Format
from gradwire.lm.data.document import Document, Invalid, content, distinct, parse

C_BACKEND = "yajl2_c"
HEAD = 2**20  # bytes in which a file must begin
PAIRED = re.compile(rb"(?:[^\\]++|\\[^u]|\\u(?:[^dD]|[dD][0-7])|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+", re.DOTALL)
HALF, PAIR = 6, 12  # bytes of a surrogate, and of two, as JSON escapes them


class Written(NamedTuple):
    """Counts of what ``write`` wrote, and whether ``max_bytes`` cut it off before the last document."""

    documents: int
    bytes: int
    cut: bool


def documents(
    path: Path, id_from: str | None = None, chats: Format = PLAIN, skipped: Invalid | None = None
) -> Iterator[Document]:
    """Yield the documents of a corpus file, in order; memory use does not depend on the size of the file.

    Args:
        path: The file.
        id_from: Source of the ids (`document.ids_from`); default: the key ``id``.
        chats: Format of chats.
        skipped: Gets the invalid documents, which are left out; None: they are an error, which describes them all.

    Raises:
        BadInput: If the file is missing, not JSON in UTF-8, not an array (``.jsonl``: not objects) or empty, or a
            document is invalid or has the id of one before it; with ``skipped``, if all are.
    """
    path, invalid, valid = Path(path), Invalid() if skipped is None else skipped, False
    for document in distinct(parse(_values(path), str(path), id_from, chats, invalid), str(path), invalid):
        if skipped is not None or not invalid.count:
            yield document
            valid = True
    if invalid.count and not (skipped is not None and valid):
        advice = "" if skipped is not None else "\nCorrect or remove them, or leave them out by --skip_invalid."
        raise BadInput(invalid.report(path) + ("." if invalid.count == 1 else advice))


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
    with atomic_write(path) as part, part.open("wb") as stream:
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
            _check_first(file, path, lines)
            sys.set_int_max_str_digits(0)  # ijson's C code crashes where Python refuses a number of many digits
            for value in ijson.items(_Paired(file), "" if lines else "item", multiple_values=lines):
                yield value
                position += 1
    except OSError as error:
        raise BadInput(f"cannot read the corpus {path}: {error.strerror}.") from None
    except (ijson.JSONError, InvalidOperation, UnicodeError) as error:
        raise BadInput(
            f"{path} is not valid JSON in UTF-8: {_reason(error)} in document {position} (counted from 0) or directly "
            "before it. Is the file complete?"
        ) from None


class _Paired:
    """A JSON file for ijson, which reads half of a surrogate pair as a question mark.

    What comes before such a half is given out first, so that the reader knows in which document it is.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rest = file, b""

    def read(self, size: int) -> bytes:
        """Return the next bytes; none at the end, or if ``size`` is 0.

        Raises:
            UnicodeError: If they begin with half of a surrogate pair.
        """
        if not size:
            return b""
        more = self._file.read(size + PAIR)
        data = self._rest + more
        match = PAIRED.match(data)
        end = match.end() if match else 0
        if len(more) < PAIR and len(data) - end < HALF:  # the file ends, perhaps too early, which ijson reports
            end = len(data)
        elif not end:
            raise UnicodeError(f"{data[:HALF].decode(errors='replace')}, half of a surrogate pair,")
        self._rest = data[end:]
        return data[:end]


def _check_first(file: BinaryIO, path: Path, lines: bool) -> None:
    """Check a file's first character that is not white space, and go back to the beginning after a byte order mark."""
    head = file.read(HEAD)
    start = len(codecs.BOM_UTF8) * head.startswith(codecs.BOM_UTF8)
    if not (first := head[start:].lstrip()[:1]):
        raise BadInput(
            f"{path} is empty: a corpus is a JSON array of objects with id, title and text, or has one in each line "
            "(.jsonl)."
        )
    if first != b"[" and not lines:
        raise BadInput(
            f"{path} is not a JSON array (it starts with {first.decode(errors='replace')!r}): a corpus is an array "
            "of objects with id, title and text; a file with one object per line must be named .jsonl."
        )
    file.seek(start)


def _reason(error: Exception) -> str:
    """The first line of the parser's message; it is bytes, and the other lines show the position."""
    if isinstance(error, InvalidOperation):
        return "a number of too large an exponent"
    message = error.args[0] if isinstance(error, ijson.JSONError) else str(error)
    text = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
    return text.splitlines()[0].rstrip(".")
