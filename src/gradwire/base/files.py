"""Atomic writes of files and folders, bounded reads of text, JSON and YAML, and digests of contents.

In JSON and YAML, duplicate keys are errors.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from gradwire.base.errors import BadInput, RunFault

BROKEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
PATH = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)
LARGEST_CONFIGURATION, LARGEST_JSON = 1 << 24, 1 << 30  # bytes of a file that is read whole
POLL_S = 0.1  # seconds between attempts to lock a file
SUMS = "SHA256SUMS"  # of a folder's files, as `sha256sum --check` reads it
SPECIAL = {stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFSOCK: "socket"}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the disk and of paths, from any library, into a one-line error about ``path``.

    Raises:
        RunFault: If the disk is full, read-only or broken, permission is denied, or the path cannot be used.
    """
    try:
        yield
    except Exception as error:
        if (cause := _of_the_disk(error)) is None:
            raise
        raise RunFault(f"{path} cannot be written: {cause}.") from error


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder; links to folders are not followed.

    Raises:
        OSError: If a folder cannot be read, which `Path.rglob` leaves out silently.
    """

    def refuse(error: OSError) -> None:
        raise error

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(parent, name) for name in names)


def check_folder(path: Path, name: str = "") -> None:
    """Check that files can be created in a folder; create the folder if it is missing.

    Args:
        path: The folder.
        name: Where the path comes from, such as a flag, for the message.

    Raises:
        BadInput: If not, for example because a file has this path.
        RunFault: If the disk is full or broken.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        blocked = isinstance(error, FileExistsError | NotADirectoryError)
        reason = f"{_named(path, name)} cannot be written: {'a file is in the way' if blocked else error.strerror}"
        raise (
            RunFault(f"{reason}.") if error.errno in BROKEN else BadInput(f"{reason}; give another path.")
        ) from error


def check_file(path: Path, name: str = "") -> None:
    """Check that a file can be written; arguments and errors as in `check_folder` and `check_regular`."""
    check_regular(path, name)  # a rename would put a file in the place of a pipe or device
    if path.is_dir():
        raise BadInput(f"{_named(path, name)} is a folder; give a file.")
    check_folder(path.parent, name)


def check_regular(path: Path, name: str = "") -> None:
    """Check that a path, if there is anything, is a file or a folder: reading a pipe or a device may never end.

    Args:
        path: The path; links are followed.
        name: As in `check_folder`.

    Raises:
        BadInput: If it is a pipe, a device or a socket, its folder cannot be searched, or its name is too long.
    """
    try:
        kind = SPECIAL.get(stat.S_IFMT(Path(path).stat().st_mode))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ENAMETOOLONG):
            raise BadInput(f"{_named(path, name)} cannot be read: {error.strerror}.") from None
        return  # the code that reads or writes the path reports it
    if kind is not None:
        raise BadInput(f"{_named(path, name)} is a {kind}, not a regular file: give a file on a disk.")


def _named(path: Path, name: str) -> str:
    """The path in a message, after the name of what it comes from."""
    return f"{name}: {path}" if name else str(path)


def _of_the_disk(error: BaseException | None) -> str | None:
    """The system's message if a disk error caused ``error``, even where a library wraps or quotes it; else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (*BROKEN, *PATH):
            return os.strerror(error.errno)
        for code in BROKEN:
            if os.strerror(code) in str(error):
                return os.strerror(code)
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a ``.part`` path to write to; on success it is flushed to disk and renamed to ``path``.

    Write the part in place. On an exception it is removed and ``path`` is unchanged. Parts of killed processes are
    removed first.
    """
    path = Path(path)
    with writing(path), _part(path, Path.touch) as part:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)


def write_back(stream: BinaryIO) -> None:
    """Let the disk write a long file while it is made, rather than all of it at the end.

    Pages that are on disk leave memory, which the file's next ones then reuse. A hint, only where there is one.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(stream.fileno(), 0, stream.tell(), os.POSIX_FADV_DONTNEED)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a ``.part`` folder to fill; on success its files are flushed to disk and it replaces ``path``.

    On an exception the part is removed and ``path`` is unchanged. Parts of killed processes are removed first.
    """
    path = Path(path)
    with writing(path), _part(path, Path.mkdir) as part:
        yield part
        for file in filter(Path.is_file, part.rglob("*")):
            with file.open("rb") as written:
                os.fsync(written.fileno())
        if path.exists():
            shutil.rmtree(path)
        part.replace(path)


def remove_leftovers(path: Path) -> None:
    """Remove parts of ``path`` left by killed processes; parts of running processes stay."""
    ours = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{8}}\.part")
    for part in path.parent.glob("*.part"):
        if ours.fullmatch(part.name):
            with suppress(OSError), _opened(part) as lock:  # its writer holds the lock or has renamed it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(part)


@contextmanager
def _part(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Create a file or folder ``<name>.<random>.part``, locked while this process writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    with ExitStack() as stack:
        part = None
        while part is None or not part.exists():  # another process removed it before it was locked
            part = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
            make(part)
            with suppress(OSError):  # without file locks, no part is removed as a leftover
                fcntl.flock(stack.enter_context(_opened(part)), fcntl.LOCK_EX)
        try:
            yield part
        except BaseException:
            _remove(part)
            raise


@contextmanager
def _opened(part: Path) -> Iterator[int]:
    """A file descriptor to lock a part with; opened for writing if it is a file, as NFS requires."""
    descriptor = os.open(part, os.O_RDONLY if part.is_dir() else os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


def lock(path: Path, *, share: bool = False, patience_s: float = 0.0) -> IO[str]:
    """Lock a file until it is closed or this process exits; ``share`` takes a shared lock.

    Args:
        path: The file, made if it is missing.
        share: Take a shared lock.
        patience_s: Seconds to wait for another process that holds the lock; a line says so.

    Raises:
        BadInput: If another process holds the lock, with its process id, or the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("a+")
    until, waits = time.monotonic() + patience_s, False
    while not _flocked(stream, fcntl.LOCK_SH if share else fcntl.LOCK_EX):
        stream.seek(0)
        holder = stream.read().strip()
        if time.monotonic() >= until:
            stream.close()
            raise BadInput(
                f"{path.parent} is in use by another process ({holder}): wait for it, or work in a copy of this folder."
            )
        if not waits:
            print(f"gradwire: waiting for process {holder}, which works in {path.parent}", file=sys.stderr, flush=True)
        waits = True
        time.sleep(POLL_S)
    stream.truncate(0)
    stream.write(str(os.getpid()))
    stream.flush()
    return stream


def _flocked(stream: IO[str], kind: int) -> bool:
    """Take the lock of a file unless another process has it; return whether it was taken."""
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # of some network file systems
        folder = Path(stream.name).parent
        stream.close()
        raise BadInput(f"{folder} cannot be locked ({error.strerror}): use a folder on another file system.") from None
    return True


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically; NaN and infinity raise ``ValueError``."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def check_size(path: Path, most: int) -> None:
    """Check that a file can be read whole.

    Raises:
        BadInput: If it is missing, unreadable, no regular file, or longer than ``most`` bytes.
    """
    check_regular(path)
    try:
        size = Path(path).stat().st_size
    except FileNotFoundError:
        raise BadInput(f"{path} is missing.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from None
    if size > most:
        raise BadInput(f"{path} has {size:,} bytes; at most {most:,} are read of such a file.")


def read_text(path: Path, most: int) -> str:
    """Read a file of text in UTF-8.

    Raises:
        BadInput: As in `check_size`, and if it is not UTF-8.
    """
    path = Path(path)
    check_size(path, most)
    try:
        return path.read_bytes().decode("utf-8-sig")  # without a byte order mark
    except FileNotFoundError:
        raise BadInput(f"{path} is missing.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not text in UTF-8 ({error}).") from None


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        BadInput: As in `read_text`, and if it is invalid JSON or has a duplicate key.
    """
    text = read_text(path, LARGEST_JSON)
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadInput(
            f"{path} is not valid JSON ({error}): correct it; if gradwire wrote it, delete it and run its step again."
        ) from None


def read_yaml(path: Path) -> Any:
    """Read a YAML file, or a JSON file if its name ends in ``.json``.

    Raises:
        BadInput: As in `read_text`, and if it is invalid or has a duplicate key.
    """
    text = read_text(path, LARGEST_CONFIGURATION)
    try:
        return parse_json(text) if Path(path).suffix == ".json" else parse_yaml(text)
    except ValueError as error:
        raise BadInput(f"{path} cannot be read as YAML or JSON: {error}.") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        BadInput: As in `read_json`, and if the file does not hold an object.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise BadInput(f"{path} must hold a JSON object, such as {{}}; it holds {json.dumps(content)[:60]}.")
    return content


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write(part)`` and rename the part to ``path``, for libraries that take a file name."""
    with atomic_write(path) as part:
        write(part)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex, read in chunks."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Write the digests of some files of a folder, by which `check_sums` knows them."""
    write_text(folder / SUMS, "".join(f"{sha256_file(folder / name)}  {name}\n" for name in sorted(names)))


def check_sums(folder: Path, names: Iterable[str]) -> None:
    """Check files of a folder against the digests that were written with them; what has none passes.

    Args:
        folder: The folder; without a file of digests, everything passes.
        names: The files to check; one that is missing passes too.

    Raises:
        BadInput: If a file differs, or cannot be read.
    """
    folder = Path(folder)
    if not (folder / SUMS).exists():
        return
    pairs = (line.split("  ", 1) for line in read_text(folder / SUMS, LARGEST_CONFIGURATION).splitlines())
    known = {pair[-1]: pair[0] for pair in pairs}
    for file in (folder / name for name in names if name in known):
        try:
            same = not file.is_file() or sha256_file(file) == known[file.name]
        except OSError as error:
            raise BadInput(f"{file} cannot be read: {error.strerror}.") from None
        if not same:
            raise BadInput(
                f"{file} is not as it was saved: its SHA-256 is not that in {SUMS}. It is damaged or was changed: "
                f"restore it, or delete {SUMS} if you changed the folder yourself."
            )


def digest(value: Any, length: int = 12) -> str:
    """A short, stable name for a JSON value: the first hex digits of the SHA-256 of its canonical form."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:length]


MERGE = "tag:yaml.org,2002:merge"  # the key `<<`, which may repeat


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: If it is invalid, nests too deeply, or has a duplicate key.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def parse_yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
        ValueError: If it is invalid, nests too deeply, or has a duplicate key.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node, seen = super().compose_mapping_node(anchor), set[Hashable]()
            for key in (key for key, _ in node.value if key.id == "scalar" and key.tag != MERGE):
                if (name := self.construct_object(key)) in seen:
                    raise ValueError(f"line {key.start_mark.line + 1}: the key {name!r} is given twice")
                seen.add(name)
            return node

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(_located(error)) from None
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _located(error: Any) -> str:
    """The error of a YAML parser, with line and column as an editor shows them."""
    mark, start = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    if mark is None:  # such as a character that YAML does not allow
        return " ".join(str(error).split())
    inside = f", {error.context} that begins in line {start.line + 1}" if start else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{inside}"


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"the key {key!r} is given twice in one object")
        mapping[key] = value
    return mapping
