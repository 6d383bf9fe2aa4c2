"""Stores of a small model, and copies of them that a test changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from gradwire import cli
from gradwire.base.files import sha256_file


def collected(model: Path, data: Path, run: Path, dim: int, *words: object) -> Path:
    """Collect and aggregate gradients; return the merged store."""
    flags = ["--model_dir", model, "--data_path", data, "--output_path", run, "--dim", dim, *words]
    assert cli.main(["grads", "collect", *map(str, flags)]) == 0
    assert cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", str(dim)]) == 0
    return run / f"dim{dim}"


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
