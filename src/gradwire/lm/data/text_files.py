"""Find text files, decompress and decode them.

Anything that is not text is refused, never guessed; a file that is left out is counted.
"""

from __future__ import annotations

import codecs
import errno
import fnmatch
import gzip
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.base.errors import BadInput
from gradwire.base.files import check_regular

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
LEGACY, LATIN_1 = "windows-1252", "iso8859-1"  # browsers assume the first, also where the second is declared
NOTATIONS = ("idna", "punycode", "raw-unicode-escape", "unicode-escape")  # Python's, of names and literals
LARGEST = 10**9  # bytes of a file's text, which is read as a whole
PIECE = 2**20  # bytes decompressed at once
WILD = re.compile(r"[*?[]")


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


class Found(NamedTuple):
    """The text files of a folder or a glob, and counts of what is left out."""

    files: list[TextFile]
    left_out: Counter[str]


class Text(NamedTuple):
    """A file's decoded text, with line feeds only, and the encoding that it was read in."""

    text: str
    encoding: str


def find(where: Path) -> Found:
    """List the text files of a folder, of a glob, or a single file, sorted by their ids.

    A folder gives the files in it and below with a known ending (`FORMATS`, also compressed), without hidden ones. A
    glob gives every file that it matches; ``**`` matches folders at any depth. Links are followed; what several of them
    lead to is read once, under a path without links if it has one. What is left out is counted.

    Raises:
        BadInput: If there are none, a folder cannot be read, or a file is not a regular one, such as a broken link or a
            pipe, or has a name that is not UTF-8.
    """
    try:
        return _find(where)
    except OSError as error:
        path = where if error.filename is None else Path(error.filename)
        raise BadInput(
            f"data_path: {shown(path)} cannot be read: {error.strerror}. Make it readable, or give a glob that "
            "leaves it out."
        ) from None


def _find(where: Path) -> Found:
    left_out: Counter[str] = Counter()
    if is_folder(where):
        root, paths = where, []
        for path in files_below(where, left_out, hidden=False):
            if _format(path):
                paths.append(path)
            else:
                left_out["other_files_left_out"] += 1
        if not paths:
            endings = ", ".join(FORMATS)
            raise BadInput(
                f"data_path: the folder {where} holds no text files ({endings}; also {' and '.join(COMPRESSED)}); for "
                f"other files give a glob, such as '{where}/**/*'."
            )
    elif os.path.lexists(where):
        check_regular(where, "data_path")
        root, paths = where.parent, [where]
    else:
        root, paths = _fixed(where), []
        if root != where:
            paths = [*dict.fromkeys(_matching(root, where.relative_to(root).parts, left_out))]
        if not paths:
            raise BadInput(f"data_path: there is no folder or file {where}, and no file that matches it as a glob.")
    if (special := next((path for path in paths if not path.is_file()), None)) is not None:
        raise BadInput(
            f"data_path: {shown(special)} is not a regular file: remove it, or give a glob that leaves it out."
        )
    files = sorted(
        (TextFile(path, path.relative_to(root).as_posix(), _format(path) or "text") for path in paths),
        key=lambda file: file.id,
    )
    for file in files:
        if shown(Path(file.id)) != file.id:
            raise BadInput(
                f"data_path: the name of {shown(file.path)} is not UTF-8, as the id of a document must be: rename "
                "it, or give a glob that leaves it out."
            )
    kept = _once(files, root.resolve())
    left_out["links_left_out"] += len(files) - len(kept)
    return Found(kept, left_out)


def _once(files: list[TextFile], root: Path) -> list[TextFile]:
    """The files without those that are the same as another, under a link."""
    real = {file.id: file.path.resolve() for file in files}
    direct = {path for id_, path in real.items() if path == root / id_}
    kept, seen = [], set(direct)
    for file in files:
        path = real[file.id]
        if path == root / file.id or path not in seen:
            kept.append(file)
            seen.add(path)
    return kept


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
        if path.suffix.lower() == ".zst" and error.errno is None:
            raise BadInput(f"{path} is not a whole zstd file ({error}): restore or remove it.") from None
        raise BadInput(f"cannot read {path}: {error.strerror or error}.") from None
    decoded = _decoded(data, path, encoding)
    return decoded._replace(text=decoded.text.replace("\r\n", "\n").replace("\r", "\n"))


def _decompressed(path: Path) -> bytes:
    """A file's bytes, without compression.

    Raises:
        BadInput: If they are more than ``LARGEST``.
    """
    pieces, size = [], 0
    with _opened(path) as stream:
        while piece := stream.read(PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > LARGEST:
                raise BadInput(
                    f"{path} holds more than {LARGEST / 1e6:,.0f} MB, decompressed, and is read as a whole: "
                    "split or remove it."
                )
    return b"".join(pieces)


def _opened(path: Path) -> Any:
    compression = path.suffix.lower()
    if compression == ".gz":
        return gzip.open(path)
    if compression == ".zst":
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return path.open("rb")


def _decoded(data: bytes, path: Path, encoding: str | None) -> Text:
    if encoding is not None:
        try:
            return Text(data.decode(encoding).removeprefix("\ufeff"), encoding)
        except UnicodeError as error:
            place = f"{error.reason} at byte {error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
            raise BadInput(f"{path} is not {encoding}: {place}.") from None
    for name in _candidates(data):
        try:
            return Text(data.decode(name), name)
        except UnicodeDecodeError:
            continue
    raise BadInput(
        f"{path} is not text: it has bytes that no encoding of text allows. Remove binary files, or give a glob that "
        "leaves them out; of a text in an unusual encoding, give `encoding`."
    )


def encoding_of_text(name: str) -> str | None:
    """Python's name of an encoding; None if it has none of that name, or one that is not of text, such as base64."""
    try:
        known = codecs.lookup(name).name
        "a".encode(known)
    except (LookupError, ValueError):
        return None
    return None if known in NOTATIONS else known


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
    declared = DECLARED.search(data[:2048])
    name = encoding_of_text(declared[1].decode("ascii")) if declared else None
    if not declared or not name or declared[0].decode(name, "replace").encode() != declared[0]:
        yield LEGACY  # a declaration that is not in the encoding that it declares, such as UTF-16, is wrong
    else:
        yield from (LEGACY, name) if name == LATIN_1 else (name, LEGACY)


def _format(path: Path) -> str | None:
    """The format that a file's name states, or None."""
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return FORMATS.get(plain.suffix.lower())


def _matching(folder: Path, parts: tuple[str, ...], left_out: Counter[str]) -> Iterator[Path]:
    """Yield the files below a folder whose path matches the parts of a glob.

    Raises:
        BadInput: If ``**`` is next to other characters.
    """
    part, rest = parts[0], parts[1:]
    if part == "**":
        for inner, files in folders_below(folder, left_out, hidden=True):
            yield from _matching(inner, rest, left_out) if rest else files
    elif "**" in part:
        raise BadInput(
            f"data_path: the glob has {part!r}, but ** must be alone between slashes, as in 'notes/**/*.txt'."
        )
    elif WILD.search(part):
        matches = re.compile(fnmatch.translate(part)).match
        for path in entries(folder):
            if matches(path.name) and is_folder(path) == bool(rest):
                yield from _matching(path, rest, left_out) if rest else [path]
    elif rest and is_folder(folder / part):
        yield from _matching(folder / part, rest, left_out)
    elif not rest and os.path.lexists(folder / part) and not is_folder(folder / part):
        yield folder / part


def _fixed(pattern: Path) -> Path:
    """The folders of a glob before its first wildcard."""
    parts = pattern.parts
    wild = next((position for position, part in enumerate(parts) if WILD.search(part)), len(parts))
    return Path(*parts[:wild])


def shown(path: Path) -> str:
    """A path as text, with escapes where it is not UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def is_folder(path: Path) -> bool:
    """Whether a path leads to a folder; unlike `Path.is_dir`, raises OSError where that cannot be known."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def entries(folder: Path) -> list[Path]:
    """The paths in a folder, by name."""
    return sorted(folder.iterdir())


def folders_below(top: Path, left_out: Counter[str], hidden: bool) -> Iterator[tuple[Path, list[Path]]]:
    """Yield a folder and all below it with their files: each once, those that only links lead to after the others.

    Args:
        top: The folder.
        left_out: Counts what is left out.
        hidden: Whether hidden files and folders are taken.

    Raises:
        OSError: If a folder cannot be read.
    """
    waiting, linked = [top], list[Path]()
    above, seen = set(top.resolve().parents), set[Path]()
    while waiting or linked:
        folder = waiting.pop() if waiting else linked.pop(0)
        real = folder.resolve()
        if real in seen or real in above:
            left_out["links_left_out"] += folder.is_symlink()
            continue
        seen.add(real)
        inside = []
        for path in entries(folder):
            if path.name.startswith(".") and not hidden:
                left_out["hidden_left_out"] += 1
            elif is_folder(path):
                (linked if path.is_symlink() else waiting).append(path)
            else:
                inside.append(path)
        yield folder, inside


def files_below(top: Path, left_out: Counter[str], hidden: bool) -> Iterator[Path]:
    """Yield the files of `folders_below`."""
    for _, inside in folders_below(top, left_out, hidden):
        yield from inside
