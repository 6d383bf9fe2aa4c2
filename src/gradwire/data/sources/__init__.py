"""Corpus sources: one file each, with ``source(data_path, revision) -> Source``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gradwire.data.corpus import Document
from gradwire.errors import BadInput


class Source(NamedTuple):
    """A stream of documents, its name for messages, and the revision that identifies its content (None: unknown)."""

    name: str
    revision: str | None
    documents: Iterable[Document]


def require_revision(name: str, wanted: str | None, actual: str) -> str:
    """Return ``actual``, the revision of the source.

    Raises:
        BadInput: If another one is wanted.
    """
    if wanted not in (None, actual):
        raise BadInput(f"--revision is {wanted}, but {name} is at revision {actual}.")
    return actual
