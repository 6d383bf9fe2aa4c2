"""Copies of stores, changed by a test."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from gradwire.base.files import sha256_file


def copied(path: Path, to: Path) -> Path:
    """Copy a store; return the copy."""
    shutil.copytree(path, to)
    return to


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON object."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def sign(path: Path) -> None:
    """Write the checksums of a store's files, as they are, into its manifest."""
    names = json.loads((path / "manifest.json").read_text())["sha256"]
    edit(path / "manifest.json", sha256={name: sha256_file(path / name) for name in names})
