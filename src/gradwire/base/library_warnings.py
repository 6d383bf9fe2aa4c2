"""Warnings of libraries, once for all ranks: every rank runs the same code, so rank 0's stand for all."""

from __future__ import annotations

import logging
import sysconfig
import warnings
from pathlib import Path
from typing import TextIO

from gradwire.base.source_digest import PACKAGE

LIBRARIES = tuple({Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")})
FROM_TORCH = "(Triggered internally at "  # in a warning of torch's C++ code, which names the Python file that called it


def silence() -> None:
    """Print no warnings of libraries; those of gradwire and of the user's modules stay."""
    logging.disable(logging.WARNING)
    show = warnings.showwarning

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not of_library(str(message), Path(filename)):
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = showwarning


def of_library(message: str, file: Path) -> bool:
    """Whether a warning is of an installed library other than gradwire."""
    if file.is_relative_to(PACKAGE):
        return FROM_TORCH in message
    return any(file.is_relative_to(folder) for folder in LIBRARIES)
