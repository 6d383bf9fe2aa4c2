"""Parsing of user-written JSON and YAML. Duplicate keys and aliases that expand to too many values are errors."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

LARGEST = 100_000  # values in a YAML file, with aliases expanded
Node = Any  # a yaml.Node, whose subclasses have an `id`
MERGE = "tag:yaml.org,2002:merge"  # the key `<<`, which may repeat


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: If it is invalid, nests too deeply, or has a duplicate key.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def parse_yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
        ValueError: If it is invalid, nests too deeply, has a duplicate key, or holds more than ``LARGEST`` values.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(loader, node, {}) > LARGEST:
            raise ValueError(f"it holds more than {LARGEST:,} values, with aliases expanded")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"the key {key!r} is given twice in one object")
        mapping[key] = value
    return mapping


def _values(loader: yaml.SafeLoader, node: Node, known: dict[Node, float]) -> float:
    """Count the values in a node, itself included; infinity if it contains an alias to itself.

    Raises:
        ValueError: If it contains a mapping with a duplicate key.
    """
    if node not in known:
        known[node] = math.inf  # until it is counted
        if node.id == "mapping":
            _check_keys(loader, [key for key, _ in node.value])
        known[node] = 1 + sum(_values(loader, child, known) for child in _parts(node))
    return known[node]


def _parts(node: Node) -> list[Node]:
    """The direct children of a node."""
    if node.id == "mapping":
        return [child for pair in node.value for child in pair]
    return node.value if node.id == "sequence" else []


def _check_keys(loader: yaml.SafeLoader, nodes: list[Node]) -> None:
    """Check that no string or number is a key twice; a list as a key fails later."""
    seen: set[Hashable] = set()
    for node in nodes:
        if node.id != "scalar" or node.tag == MERGE:
            continue
        key = loader.construct_object(node)
        if key in seen:
            raise ValueError(f"line {node.start_mark.line + 1}: the key {key!r} is given twice")
        seen.add(key)
