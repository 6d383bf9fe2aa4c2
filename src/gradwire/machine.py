"""What a process runs on: the processor's name and the versions of packages."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def installed(package: str) -> str | None:
    """A package's version, if it is there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's model as the kernel names it."""
    names = re.findall(r"^(?:model name|Model)\s*:\s*(.+)$", text(CPUINFO) or "", re.MULTILINE)
    return names[0].strip() if names else platform.processor() or platform.machine()


def text(path: Path) -> str | None:
    """What a file of the kernel says, if this one may read it."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
