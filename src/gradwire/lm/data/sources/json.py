"""A local corpus file: a JSON array of objects with id, title and text, or one object per line (``.jsonl``)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.lm.data import SKIP_INVALID, corpus
from gradwire.lm.data.document import Document, Invalid
from gradwire.lm.data.sources import Source, Stream, folder_name, require_revision


class Json(Source):
    """A JSON array of objects with id, title and text, or one object per line (``.jsonl``).

    Instead of text, an object may have prompt and completion, or messages (a list of role and content). The revision is
    the SHA-256 of the file.
    """

    name = "json"

    data_path: Path = Field(description="the corpus file, a JSON array or .jsonl")
    id_from: str | None = Field(
        default=None,
        description="key of a document's id, or an entry point of the group gradwire.sample_ids (None: id)",
    )

    skip_invalid: bool = Field(default=False, description=SKIP_INVALID)

    def open(self) -> Stream:
        """Return the documents of the file."""
        where, metadata = str(self.data_path), Counter[str]()
        revision = require_revision(where, self.revision, self._digest())
        return Stream(where, revision, self._documents(metadata), metadata)

    def _documents(self, metadata: Counter[str]) -> Iterator[Document]:
        skipped = Invalid() if self.skip_invalid else None
        yield from corpus.documents(self.data_path, self.id_from, skipped=skipped)
        if skipped is not None:
            metadata["invalid_left_out"] = skipped.count

    def content(self) -> Any:
        """The file's digest, where ids come from, and whether documents may be left out."""
        return [self._digest(), self.id_from, *([True] if self.skip_invalid else [])]

    @property
    def label(self) -> str:
        """The file's name."""
        return folder_name(self.data_path.stem)

    def _digest(self) -> str:
        if not os.path.lexists(self.data_path):
            raise BadInput(f"data_path: there is no corpus file {self.data_path}.")
        return corpus.sha256(self.data_path)
