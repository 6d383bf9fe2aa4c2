"""Custom document ids: from another key than ``id``, or from a function of an installed package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeAlias

from gradwire.base.errors import BadInput

GROUP = "gradwire.sample_ids"

IdOf: TypeAlias = Callable[[Mapping[str, Any]], Any]


def id_of(name: str | None) -> IdOf:
    """Return the function that gives a document's id.

    Args:
        name: A key of the document, or an entry point of the group ``gradwire.sample_ids``: a function that takes the
            document, a mapping, and returns its id. None: the key ``id``.

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
