"""Where a corpus comes from: one file per source, each with ``source(data_path, revision) -> Source``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gradwire.data.corpus import Document
from gradwire.errors import BadInput


class Source(NamedTuple):
    """A stream of documents, its name in messages, and the revision that says exactly what it holds (None: unknown)."""

    name: str
    revision: str | None
    documents: Iterable[Document]


def require_revision(name: str, wanted: str | None, actual: str) -> str:
    """Return ``actual``, the revision that is there.

    Raises:
        BadInput: If another one was asked for.
    """
    if wanted not in (None, actual):
        raise BadInput(f"--revision {wanted} was asked for, but {name} is at revision {actual}.")
    return actual
