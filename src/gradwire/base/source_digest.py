"""Digests of the source that a module depends on: an edit re-runs only the rules that depend on it."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from gradwire.base.errors import BadInput
from gradwire.base.files import digest
from gradwire.base.plugins import PACKAGE

# Only import statements are parsed, which are found by their form: parsing whole files takes a rank 0.4 s at its start.
TEXT = re.compile(rb'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""', re.DOTALL)
STATEMENT = re.compile(rb"^[ \t]*((?:from|import)[ \t][^\n(]*(?:\([^)]*\))?)", re.MULTILINE)


# Why: docs/decisions.md, "The source digest is static".
def source_digest(*modules: str, package: Path = PACKAGE) -> str:
    """Digest of the source of modules and of all that they import from this package, at any depth.

    Imports are parsed, not executed: imports inside functions count, names computed at run time do not. Compressors
    are looked up by name, so a caller that depends on one passes its module too.

    Args:
        modules: Full module names, such as ``"gradwire.bench.training.train"``.
        package: The package's folder; its name is the first part of the module names.

    Raises:
        BadInput: If a module does not exist.
    """
    return digest({name: hashlib.sha256(source).hexdigest() for name, source in closure(modules, package).items()})


def closure(modules: tuple[str, ...], package: Path = PACKAGE) -> dict[str, bytes]:
    """The source, by module name, of the modules, their imports from the package, and their parent packages.

    Raises:
        BadInput: If a module does not exist.
    """
    sources: dict[str, bytes] = {}
    pending = list(modules)
    while pending:
        name = pending.pop()
        if name in sources:
            continue
        file = module_file(name, package)
        if file is None:
            raise BadInput(f"there is no module {name!r} in {package}.")
        sources[name] = file.read_bytes()
        parent = name.rpartition(".")[0]
        pending += [target for target in {*imports(sources[name]), parent} if module_file(target, package)]
    return sources


@cache
def module_file(name: str, package: Path = PACKAGE) -> Path | None:
    """The file of a module or package by its full name; None if it is not in this package."""
    if name.partition(".")[0] != package.name:  # as for most imports: saves a disk access
        return None
    path = package.parent.joinpath(*name.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((file for file in candidates if file.is_relative_to(package) and file.is_file()), None)


@cache
def imports(source: bytes) -> frozenset[str]:
    """Full names of all imports in a module's source: ``from a import b`` gives ``a`` and ``a.b``."""
    statements = b"\n".join(STATEMENT.findall(TEXT.sub(b"", source)))
    return frozenset(_imports(ast.parse(statements)))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module or ''}"
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
