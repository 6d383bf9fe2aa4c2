"""A local corpus file: a JSON array of objects with id, title and text, or one object per line (``.jsonl``)."""

from __future__ import annotations

from pathlib import Path

from gradwire.data import corpus
from gradwire.data.sources import Source, require_revision
from gradwire.errors import BadInput
from gradwire.files import sha256_file


def source(data_path: Path | None, revision: str | None, id_from: str | None = None) -> Source:
    """Return the documents of a corpus file; its revision is the SHA-256 of its bytes.

    Raises:
        BadInput: If the file does not exist, or another revision is wanted.
    """
    if data_path is None or not data_path.is_file():
        raise BadInput(f"--source json needs --data_path FILE, a corpus file ({data_path or 'nothing'} given).")
    name = str(data_path)
    return Source(name, require_revision(name, revision, sha256_file(data_path)), corpus.documents(data_path, id_from))
