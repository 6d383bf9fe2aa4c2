"""Find text files, decompress and decode them; anything that is not text is refused, never guessed."""

from __future__ import annotations

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gradwire.errors import BadInput

FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "markdown",
    ".markdown": "markdown",
    ".rst": "rst",
    ".html": "html",
    ".htm": "html",
}
COMPRESSED = (".gz", ".zst")
BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
DECLARED = re.compile(rb"""(?:charset\s*=|encoding\s*=|coding[:=])\s*["']?\s*([-\w.]+)""", re.I)  # HTML, XML, Emacs
CONTROL = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")  # in no text of an 8-bit encoding
LEGACY = "windows-1252"  # what browsers assume


class TextFile(NamedTuple):
    """A file of a corpus.

    Attributes:
        path: The file.
        id: Its path below the corpus's root, with ``/``.
        format: ``text``, ``markdown``, ``rst`` or ``html``.
    """

    path: Path
    id: str
    format: str


class Text(NamedTuple):
    """A file's decoded text, with line feeds only, and the encoding that it was read in."""

    text: str
    encoding: str


def find(where: Path) -> list[TextFile]:
    """List the text files of a folder, of a glob, or a single file, sorted by their ids.

    A folder gives the files in it and below with a known ending (`FORMATS`, also compressed), without hidden ones. A
    glob gives every file that it matches; ``**`` matches folders at any depth. A symbolic link to another of the files
    is left out.

    Raises:
        BadInput: If there are none, or one is not a regular file, such as a broken link or a FIFO.
    """
    if where.is_dir():
        root, paths = where, [path for path in _walk(where) if _format(path)]
        if not paths:
            endings = ", ".join(FORMATS)
            raise BadInput(
                f"data_path: the folder {where} holds no text files ({endings}; also {' and '.join(COMPRESSED)}); for "
                f"other files give a glob, such as '{where}/**/*'."
            )
    elif where.is_file():
        root, paths = where.parent, [where]
    else:
        root, paths = _fixed(where), []
        if root != where:
            paths = [path for path in root.glob(where.relative_to(root).as_posix()) if not path.is_dir()]
        if not paths:
            raise BadInput(f"data_path: there is no folder or file {where}, and no file that matches it as a glob.")
    if (special := next((path for path in paths if not path.is_file()), None)) is not None:
        raise BadInput(f"data_path: {special} is not a regular file: remove it, or give a glob that leaves it out.")
    real = {path.resolve() for path in paths if not path.is_symlink()}
    kept = [path for path in paths if not path.is_symlink() or path.resolve() not in real]
    return sorted(
        (TextFile(path, path.relative_to(root).as_posix(), _format(path) or "text") for path in kept),
        key=lambda file: file.id,
    )


def read(path: Path, encoding: str | None = None) -> Text:
    """Read a whole text file.

    Args:
        path: The file; one that ends in ``.gz`` or ``.zst`` is decompressed.
        encoding: Its encoding; None detects it: a byte order mark, UTF-8, the encoding that the text declares, or
            windows-1252.

    Raises:
        BadInput: If the file cannot be read or decompressed, or is not text.
    """
    try:
        data = _decompressed(path)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BadInput(f"{path} is not a whole gzip file ({error}): restore or remove it.") from None
    except OSError as error:
        if path.suffix == ".zst" and error.errno is None:
            raise BadInput(f"{path} is not a whole zstd file ({error}): restore or remove it.") from None
        raise BadInput(f"cannot read {path}: {error.strerror or error}.") from None
    found = _decoded(data, path, encoding)
    return found._replace(text=found.text.replace("\r\n", "\n").replace("\r", "\n"))


def _decompressed(path: Path) -> bytes:
    if path.suffix == ".gz":
        with gzip.open(path) as stream:
            return stream.read()
    if path.suffix == ".zst":
        import pyarrow

        with pyarrow.OSFile(str(path)) as file, pyarrow.CompressedInputStream(file, "zstd") as stream:
            return stream.read()
    return path.read_bytes()


def _decoded(data: bytes, path: Path, encoding: str | None) -> Text:
    if encoding is not None:
        try:
            return Text(data.decode(encoding), encoding)
        except UnicodeDecodeError as error:
            raise BadInput(f"{path} is not {encoding}: {error.reason} at byte {error.start}.") from None
    for name in _candidates(data):
        try:
            return Text(data.decode(name), name)
        except (UnicodeDecodeError, LookupError):
            continue
    raise BadInput(
        f"{path} is not text: it has bytes that no encoding of text allows. Remove binary files, or give a glob that "
        "leaves them out; of a text in an unusual encoding, give `encoding`."
    )


def _candidates(data: bytes) -> Iterator[str]:
    """Yield encodings to try, the most certain first; none for binary data."""
    marked = next((name for mark, name in BOMS if data.startswith(mark)), None)
    if marked is not None:
        yield marked
        return
    if b"\0" in data:
        return
    yield "utf-8"
    if CONTROL.search(data):
        return
    if declared := DECLARED.search(data[:2048]):
        yield declared[1].decode("ascii", "replace").lower()
    yield LEGACY


def _format(path: Path) -> str | None:
    """The format that a file's name states, or None."""
    plain = path.with_suffix("") if path.suffix in COMPRESSED else path
    return FORMATS.get(plain.suffix.lower())


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent) / name for name in files if not name.startswith("."))


def _fixed(pattern: Path) -> Path:
    """The folders of a glob before its first wildcard."""
    parts = pattern.parts
    wild = next((at for at, part in enumerate(parts) if set("*?[") & set(part)), len(parts))
    return Path(*parts[:wild])
