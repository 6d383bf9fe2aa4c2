"""Where a document's id comes from, if not from its ``id``: another key, or a function that some package adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeAlias

from gradwire.errors import BadInput

GROUP = "gradwire.sample_ids"

IdOf: TypeAlias = Callable[[Mapping[str, Any]], Any]


def id_of(name: str | None) -> IdOf:
    """How a document's id is had from it.

    Args:
        name: A key of the document, or an entry point of the group ``gradwire.sample_ids``: a function of the document,
            a mapping, that gives its id. None: the key ``id``.

    Raises:
        BadInput: If the function cannot be loaded.
    """
    key = name or "id"
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as error:
                raise BadInput(f"the id extractor {name} ({entry.value}) cannot be loaded: {error!r}") from error
    return lambda document: document.get(key)
