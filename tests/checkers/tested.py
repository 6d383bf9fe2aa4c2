"""Source files without a test of their name: ``python tests/checkers/tested.py``; part of `make lint`.

The test of ``src/gradwire/ROOM/FILE.py`` is ``tests/ROOM/test_FILE.py``, or a test whose docstring names the file.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gradwire"
TESTS = ROOT / "tests"


def named() -> set[str]:
    """The source files that docstrings of tests name, such as ``rows.py`` or ``store/merge.py``."""
    docstrings = (ast.get_docstring(ast.parse(file.read_text())) or "" for file in TESTS.rglob("test_*.py"))
    return {name for text in docstrings for name in re.findall(r"`([\w/]+\.py)`", text)}


def untested() -> list[Path]:
    """The source files without a test."""
    names = named()
    files = sorted(file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if not file.name.startswith("__"))
    return [
        file
        for file in files
        if not (TESTS / file.parent / f"test_{file.name}").exists()
        and not any(f"/{file}".endswith(f"/{name}") for name in names)
    ]


if __name__ == "__main__":
    if missing := untested():
        sys.exit("no test has the name of, or names: " + ", ".join(map(str, missing)))
