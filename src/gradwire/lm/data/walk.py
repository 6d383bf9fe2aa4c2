"""Walks through folders that follow links and leave nothing out silently: what cannot be read raises OSError."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


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


def folders(top: Path, left_out: Counter[str], hidden: bool) -> Iterator[tuple[Path, list[Path]]]:
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


def files(top: Path, left_out: Counter[str], hidden: bool) -> Iterator[Path]:
    """Yield the files of `folders`."""
    for _, inside in folders(top, left_out, hidden):
        yield from inside
