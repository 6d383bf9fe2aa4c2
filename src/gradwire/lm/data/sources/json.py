"""A local corpus file: a JSON array of objects with id, title and text, or one object per line (``.jsonl``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.lm.data import corpus
from gradwire.lm.data.sources import Source, Stream, folder_name, require_revision


class Json(Source):
    """A JSON array of objects with id, title and text, or one object per line (``.jsonl``).

    Instead of text, an object may have prompt and completion, or messages (a list of role and content), and a weight of
    its targets. The revision is the SHA-256 of the file.
    """

    name = "json"

    data_path: Path = Field(description="the corpus file, a JSON array or .jsonl")
    id_from: str | None = Field(
        None, description="key of a document's id, or an entry point of the group gradwire.sample_ids (None: id)"
    )

    def open(self) -> Stream:
        """Return the documents of the file."""
        where = str(self.data_path)
        revision = require_revision(where, self.revision, self._digest())
        return Stream(where, revision, corpus.documents(self.data_path, self.id_from))

    def content(self) -> Any:
        """The file's digest, and where ids come from."""
        return [self._digest(), self.id_from]

    @property
    def label(self) -> str:
        """The file's name."""
        return folder_name(self.data_path.stem)

    def _digest(self) -> str:
        if not os.path.lexists(self.data_path):
            raise BadInput(f"data_path: there is no corpus file {self.data_path}.")
        return corpus.sha256(self.data_path)
