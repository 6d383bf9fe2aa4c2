"""Text files: a folder, a glob or one file of text, Markdown, HTML or reStructuredText, also gzip or zstd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from gradwire.base.files import digest
from gradwire.lm.data import corpus, sections, text_files
from gradwire.lm.data.sources import Source, Stream, folder_name, require_revision
from gradwire.lm.data.text_files import TextFile


def _known(encoding: str) -> str:
    known = text_files.encoding_of_text(encoding)
    if known is None:
        raise ValueError(f"Python knows no encoding of text {encoding!r}")
    return known


class Text(Source):
    """A folder, a glob or one file of text, Markdown, HTML or reStructuredText, also compressed (.gz, .zst).

    A document's id is the file's path below the folder, and with `split_at` headings also the line of the heading:
    ``guide/start.md:12``. Blank files are left out and counted, as are hidden ones and those of other endings in a
    folder. The revision is a digest of all files.
    """

    name = "text"

    data_path: Path = Field(description="a folder, a glob such as 'docs/**/*.rst.gz', or a file")
    split_at: Literal["files", "headings"] = Field("files", description="where a document ends")
    encoding: Annotated[str, AfterValidator(_known)] | None = Field(
        None, description="the files' encoding (None: detected for each file)"
    )

    def open(self) -> Stream:
        """Return the documents in the order of the files' paths."""
        files, metadata = text_files.find(self.data_path)
        where = str(self.data_path)
        revision = require_revision(where, self.revision, files_digest(files))
        return Stream(where, revision, corpus.parse(self._documents(files, metadata), where), metadata)

    def content(self) -> Any:
        """The digest of the files, and how they are read."""
        return [files_digest(text_files.find(self.data_path).files), self.split_at, self.encoding]

    @property
    def label(self) -> str:
        """The name of the folder or file."""
        return folder_name(self.data_path.name if self.data_path.exists() else "text")

    def _documents(self, files: list[TextFile], metadata: Counter[str]) -> Iterator[dict[str, str]]:
        cut = sections.split if self.split_at == "headings" else sections.whole
        for file in files:
            text, encoding = text_files.read(file.path, self.encoding)
            metadata["files"] += 1
            metadata[f"files_in_{encoding}"] += 1
            documents = list(cut(text, file.format))
            metadata["files_without_text"] += not documents
            for line, title, body in documents:
                id_ = f"{file.id}:{line}" if self.split_at == "headings" else file.id
                yield {"id": id_, "title": title or file.path.name, "text": body}


def files_digest(files: list[TextFile]) -> str:
    """A digest of the files' ids and bytes.

    Raises:
        BadInput: If a file cannot be read.
    """
    return digest([[file.id, corpus.sha256(file.path)] for file in files], length=64)
