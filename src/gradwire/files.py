"""Files that appear whole or not at all, and digests of what they hold."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradwire.errors import BadInput


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a ``.part`` path to write to; on success it is flushed to disk and renamed to ``path``.

    On an exception the part is removed and ``path`` is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a ``.part`` folder to fill; on success its files are flushed to disk and it takes the place of ``path``.

    On an exception the part is removed and ``path`` is left as it was. What a killed process left is removed first.
    """
    path = Path(path)
    for left in path.parent.glob(f"{path.name}.*.part"):
        shutil.rmtree(left)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        yield part
        for file in filter(Path.is_file, part.rglob("*")):
            with file.open("rb") as written:
                os.fsync(written.fileno())
        if path.exists():
            shutil.rmtree(path)
        part.replace(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, whole or not at all; NaN and infinity are refused, not written."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file that gradwire wrote.

    Raises:
        BadInput: If the file is missing or is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path} is missing.") from None
    except ValueError as error:
        raise BadInput(f"{path} is not valid JSON ({error}); delete it and run its step again.") from None


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write(part)`` and rename the part to ``path``: for libraries that want a file name."""
    with whole(path) as part:
        write(part)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex, read in pieces."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(value: Any, length: int = 12) -> str:
    """A short, stable name for a JSON value: the first hex digits of the SHA-256 of its canonical form."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:length]
