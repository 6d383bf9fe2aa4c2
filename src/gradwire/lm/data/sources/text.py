"""Text files: a folder, a glob or one file of plain text, Markdown or reStructuredText, also compressed by gzip."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.base.files import check_regular, digest, files_below
from gradwire.lm.data import corpus
from gradwire.lm.data.document import parse
from gradwire.lm.data.sources import Source, Stream, folder_name, require_revision

ENDINGS = (".txt", ".md", ".rst")
WILD = re.compile(r"[*?[]")
ATX = re.compile(r" {0,3}#{1,6}[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$")  # Markdown's "## Heading ##"
ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1+[ \t]*$")  # reStructuredText's line below, and above, a heading


class Text(Source):
    """A folder, a glob or one file of plain text, Markdown or reStructuredText, also compressed (.gz).

    A file is a document, and its path below the folder is the document's id. Blank files are left out and counted, as
    are hidden ones and those of other endings in a folder. The revision is a digest of all files.
    """

    name = "text"

    data_path: Path = Field(description="a folder, a glob such as 'docs/**/*.rst.gz', or a file")
    encoding: str = Field(default="utf-8", description="the files' encoding")

    def open(self) -> Stream:
        """Return the documents in the order of the files' paths."""
        metadata: Counter[str] = Counter()
        files = self._files(metadata)
        where = str(self.data_path)
        revision = require_revision(where, self.revision, files_digest(files))
        return Stream(where, revision, parse(self._documents(files, metadata), where), metadata)

    def content(self) -> Any:
        """The digest of the files, and their encoding."""
        return [files_digest(self._files(Counter())), self.encoding]

    @property
    def label(self) -> str:
        """The name of the folder or file."""
        return folder_name(self.data_path.name if self.data_path.exists() else "text")

    def _files(self, left_out: Counter[str]) -> dict[str, Path]:
        """The files by id, sorted.

        Raises:
            BadInput: If there are none, or the path is a pipe or a device.
        """
        where = self.data_path
        check_regular(where, "data_path")
        in_folder = where.is_dir()
        root = where if in_folder else where.parent if os.path.lexists(where) else _before_wildcards(where)
        files = {}
        try:
            if in_folder:
                paths = [*files_below(where)]
            else:
                paths = [where] if os.path.lexists(where) else [*root.glob(str(where.relative_to(root)))]
        except OSError as error:
            raise BadInput(f"data_path: {error.filename} cannot be read: {error.strerror}.") from None
        except ValueError as error:  # such as a ** next to other characters
            raise BadInput(f"data_path: {where} is no glob: {error}.") from None
        for path in paths:
            below = path.relative_to(root)
            if in_folder and any(part.startswith(".") for part in below.parts):
                left_out["hidden_left_out"] += not path.is_dir()
            elif path.is_file() and (not in_folder or _ending(path) in ENDINGS):
                files[os.fsencode(below.as_posix()).decode(errors="backslashreplace")] = path
            else:
                left_out["other_files_left_out"] += not path.is_dir()
        if not files:
            endings = ", ".join(ENDINGS)
            raise BadInput(
                f"data_path: {where} is no text file, no folder that holds any ({endings}, also compressed as .gz) and "
                "no glob that matches a file."
            )
        return dict(sorted(files.items()))

    def _documents(self, files: dict[str, Path], metadata: Counter[str]) -> Iterator[dict[str, str]]:
        for id_, path in files.items():
            metadata["files"] += 1
            title, body = split_title(read(path, self.encoding), _ending(path))
            if body:
                yield {"id": id_, "title": title or id_.rpartition("/")[2], "text": body}
            else:
                metadata["files_without_text"] += 1


def files_digest(files: dict[str, Path]) -> str:
    """A digest of the files' ids and bytes.

    Raises:
        BadInput: If a file cannot be read.
    """
    return digest([[id_, corpus.sha256(path)] for id_, path in files.items()], length=64)


def read(path: Path, encoding: str) -> str:
    """Read a text file, with line feeds only; one that ends in ``.gz`` is decompressed.

    Raises:
        BadInput: If the file cannot be read or decompressed, or is not text in ``encoding``.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix.lower() == ".gz" else data
        text = data.decode(encoding).removeprefix("\ufeff")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BadInput(f"{path} is not a whole gzip file ({error}): restore or remove it.") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}.") from None
    except (LookupError, UnicodeError) as error:
        raise BadInput(
            f"{path} cannot be read as text in {encoding} ({error}): give its encoding as `encoding`, or a glob that "
            "leaves it out."
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def split_title(text: str, ending: str) -> tuple[str, str]:
    """Split a text into the heading that begins it and the rest; without a rest, the heading is the text.

    Args:
        text: The text.
        ending: The ending of its file, without ``.gz``; only ``.md`` and ``.rst`` have headings.

    Returns:
        The title, or "", and the body; both are "" for blank text.
    """
    lines = text.split("\n")
    while lines and not lines[0].strip():
        del lines[0]
    first, second, third = [*lines, "", "", ""][:3]
    title, length = "", 0
    if ending == ".md" and (heading := ATX.match(first)):
        title, length = heading[1], 1
    elif ending == ".rst" and first == third and _underlined(second, first):
        title, length = second, 3
    elif ending in (".md", ".rst") and not first.startswith((" ", "\t")) and _underlined(first, second):
        title, length = first, 2
    body = "\n".join(lines[length:]).strip("\n")
    return (title.strip(), body) if body.strip() else ("", "\n".join(lines).strip("\n"))


def _underlined(title: str, adornment: str) -> bool:
    """Whether the second line marks the first one as a heading; it is as long, or docutils would warn."""
    marked = ADORNMENT.match(adornment) is not None and not ADORNMENT.match(title)
    return bool(title.strip()) and marked and len(adornment.rstrip()) >= len(title.strip())


def _before_wildcards(pattern: Path) -> Path:
    """The folders of a glob before its first wildcard."""
    parts = pattern.parts
    wild = next((position for position, part in enumerate(parts) if WILD.search(part)), len(parts) - 1)
    return Path(*parts[:wild])


def _ending(path: Path) -> str:
    """The ending that states the format of a file, in lower case."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
