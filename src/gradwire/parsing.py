"""JSON and YAML that people write: a key given twice is an error, and so are aliases that stand for too much."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.errors import BadInput

if TYPE_CHECKING:
    import yaml

LARGEST = 100_000  # values in a YAML file, each alias counted as what it stands for
Node = Any  # a yaml.Node, whose subclasses have an `id`
MERGE = "tag:yaml.org,2002:merge"  # the key `<<`, which may come again


def read_yaml(path: Path) -> Any:
    """The value of a YAML file, or of a JSON file if its name ends in ``.json``.

    Raises:
        BadInput: If it can't be read, is neither, has a key twice, or holds more than ``LARGEST`` values.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        return parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as YAML or JSON: {error}.") from None


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: If it isn't JSON, nests too deeply, or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def parse_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        ValueError: If it isn't YAML, nests too deeply, has a key twice, or holds more than ``LARGEST`` values.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(loader, node, {}) > LARGEST:
            raise ValueError(f"it holds more than {LARGEST:,} values, each alias counted as what it stands for")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice in one object")
        found[key] = value
    return found


def _values(loader: yaml.SafeLoader, node: Node, known: dict[Node, float]) -> float:
    """How many values a node holds, itself included; infinitely many if it holds an alias to itself.

    Raises:
        ValueError: If a mapping in it has a key twice.
    """
    if node not in known:
        known[node] = math.inf  # while it is counted
        if node.id == "mapping":
            _check_keys(loader, [key for key, _ in node.value])
        known[node] = 1 + sum(_values(loader, part, known) for part in _parts(node))
    return known[node]


def _parts(node: Node) -> list[Node]:
    """What stands directly in a node."""
    if node.id == "mapping":
        return [part for pair in node.value for part in pair]
    return node.value if node.id == "sequence" else []


def _check_keys(loader: yaml.SafeLoader, nodes: list[Node]) -> None:
    """Refuse a key that comes twice, as a string or as a number; a key that is a list fails later on."""
    seen: set[Hashable] = set()
    for node in nodes:
        if node.id != "scalar" or node.tag == MERGE:
            continue
        key = loader.construct_object(node)
        if key in seen:
            raise ValueError(f"line {node.start_mark.line + 1}: the key {key!r} is given twice")
        seen.add(key)
