"""The documentation in every Python installation: language topics and the standard library's docstrings.

Modules are parsed, not imported, because importing some of them opens a browser or needs a display.
"""

from __future__ import annotations

import ast
import platform
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gradwire.lm.data.document import parse
from gradwire.lm.data.sources import Source, Stream, require_revision

MIN_CHARACTERS = 150  # shorter docstrings are signatures and one-liners rather than prose
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "_bundled"}

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Pydocs(Source):
    """The documentation of the running Python: language topics and docstrings; needs no network.

    Short texts and repeated ones are left out and counted. The revision is the Python version.
    """

    name = "pydocs"

    def open(self) -> Stream:
        """Return the documents in a deterministic order."""
        where = "the running Python's documentation"
        revision = require_revision(where, self.revision, platform.python_version())
        metadata: Counter[str] = Counter()
        return Stream(where, revision, parse(_values(metadata), where), metadata)


def _values(metadata: Counter[str]) -> Iterator[dict[str, str]]:
    """Yield documents of at least ``MIN_CHARACTERS``, each text and each name once, in a deterministic order."""
    texts, names = set(), set()
    for name, text in (*_topics(), *_docstrings(Path(sysconfig.get_path("stdlib")))):
        if len(text) < MIN_CHARACTERS:
            metadata["short_texts_left_out"] += 1
        elif text in texts or name in names:
            metadata["repeated_texts_left_out"] += 1
        else:
            texts.add(text)
            names.add(name)
            yield {"id": f"pydocs/{name}", "title": name.removeprefix("topics/"), "text": text}


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topics/{name}", topics[name].strip()


def _docstrings(root: Path) -> Iterator[tuple[str, str]]:
    for file in _modules(root):
        name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        yield from _described(ast.parse(file.read_bytes()), name)


def _modules(root: Path) -> Iterator[Path]:
    for name in sorted(sys.stdlib_module_names):
        for file in (root / f"{name}.py", *sorted((root / name).rglob("*.py"))):
            if file.is_file() and not SKIPPED_FOLDERS.intersection(file.relative_to(root).parts):
                yield file


def _described(node: Definition, name: str) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a public module, class or function, and of the definitions in a module or class."""
    if _private(name.rpartition(".")[2]):
        return
    docstring = ast.get_docstring(node)
    if docstring:
        yield name, docstring
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for inner in node.body:
            if isinstance(inner, Definition):
                yield from _described(inner, f"{name}.{inner.name}")


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
