"""Every module, member, file and entry-point group that pages and modules name exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gradwire"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
SOURCES = [*PACKAGE.rglob("*.py")]
HISTORY = {"CHANGELOG.md"}  # names what left
MADE = {  # by the reader of a page
    "gradwire.Dither",
    "src/gradwire/comm/compressors/methods/dither.py",
    "tests/comm/compressors/methods/test_dither.py",
}
NAME = re.compile(r"(?<![\w./-])gradwire(?:\.[A-Za-z_]\w*)+")
TOP = "src|tests|benchmarks|configs|docs|examples|workflow|containers"
FILE = re.compile(rf"(?<![\w./:-])(?:{TOP})/[\w./-]*\w\.(?:py|md|yaml|yml|jsonl|csv|sh|json|lock)\b")
ROOM = re.compile(r"(?<=`)(?:base|comm|lm|attribution|bench)/[\w/-]*\w\.py(?=`)")  # from src/gradwire
MEMBER = re.compile(r"`([A-Z]\w+)\.([a-z_]\w*)(?:\([^`]*\))?`")


@cache
def tree(file: Path) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def groups() -> set[str]:
    """Groups of entry points, and files that are called gradwire.*: they are strings of the source."""
    nodes = (node for file in SOURCES for node in ast.walk(tree(file)))
    constants = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in constants if re.fullmatch(r"gradwire\.[a-z_]+", text)}


@cache
def names(module: Path) -> set[str]:
    """Names that a module defines or imports."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@cache
def resolves(name: str) -> bool:
    """Whether a dotted name is a module, a member of one, or a group of entry points."""
    place, (_, *parts) = PACKAGE, name.split(".")
    while parts and ((place / parts[0]).is_dir() or (place / f"{parts[0]}.py").is_file()):
        place = place / parts.pop(0)
    if not parts or name in groups():
        return True
    files = (place.with_suffix(".py"), place / "__init__.py", place / "__init__.pyi")
    first, *rest = parts
    defined = any(first in names(file) for file in files if file.is_file())
    return defined and all(member in members().get(first, {member}) for member in rest[:1])


@cache
def members() -> dict[str, set[str]]:
    """Names that are defined in the classes of the package, by class; those of its bases in the package included."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for file in SOURCES:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef):
                defined = own.setdefault(node.name, set())
                bases.setdefault(node.name, set()).update(ast.unparse(base).split("[")[0] for base in node.bases)
                for each in ast.walk(node):
                    if isinstance(each, ast.FunctionDef):
                        defined.add(each.name)
                    elif isinstance(each, ast.AnnAssign | ast.Assign):
                        targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                        defined |= {getattr(target, "id", getattr(target, "attr", "")) for target in targets}

    def all_of(name: str) -> set[str]:
        return own.get(name, set()).union(*(all_of(base) for base in bases.get(name, ()) if base != name))

    return {name: all_of(name) for name in own if all(base in own for base in bases[name])}


def lost(file: Path) -> Iterator[str]:
    """References of a page or a module that lead nowhere."""
    text = file.read_text(encoding="utf-8")
    yield from (name for name in set(NAME.findall(text)) - MADE if not resolves(name))
    places = (ROOT, file.parent)
    yield from (path for path in set(FILE.findall(text)) - MADE if not any((place / path).exists() for place in places))
    yield from (path for path in set(ROOM.findall(text)) if not (PACKAGE / path).exists())
    known = members()
    yield from (
        f"{name}.{member}" for name, member in set(MEMBER.findall(text)) if member not in known.get(name, {member})
    )


def test_pages_and_modules_name_what_exists():
    files = [*SOURCES, *(page for page in PAGES if page.name not in HISTORY)]
    wrong = {str(file.relative_to(ROOT)): found for file in files if (found := sorted(lost(file)))}
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "`gradwire.lm.models.nowhere`",
        "``gradwire.nowhere``",
        "see `benchmarks/nowhere.md`",
        "in `comm/nowhere.py`",
        "`Reducer.nowhere()`",
    ],
)
def test_a_reference_to_nothing_would_be_seen(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(lost(page))


def test_the_figure_of_the_gradients_way_names_files():
    """Its paths are below `src/gradwire/comm/`."""
    page = (ROOT / "docs" / "explanation" / "code.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"\b(?:collectives|compressors|parallel)/\w[\w/]*\.py", page.split("```")[1]))
    assert len(paths) > 12 and {path for path in paths if not (PACKAGE / "comm" / path).exists()} == set()
