"""Any dataset of the Hugging Face Hub, streamed, or a local folder that ``save_to_disk`` wrote."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from pydantic import Field, model_validator

from gradwire.base.errors import BadInput, unknown
from gradwire.base.files import check_regular, digest, files_below, read_object, sha256_file
from gradwire.lm.data.document import missing, parse
from gradwire.lm.data.sources import Source, Stream, folder_name, require_revision

ONE, SEVERAL = "state.json", "dataset_dict.json"  # files of a saved split, and of a folder of saved splits
UNNAMED = "train"  # how a saved split without a name is called
WITHOUT_NETWORK = "Check the network (and unset HF_HUB_OFFLINE), or give a local folder that `save_to_disk` wrote."
TIMEOUT = 10  # seconds to wait for the Hub


class Datasets(Source):
    """A dataset of the Hugging Face Hub, streamed, or a local folder that `save_to_disk` wrote.

    Rows without text, completion or answer are left out and counted. The revision is a commit, branch or tag on the
    Hub, and a digest of a local folder.
    """

    name = "datasets"

    data_path: Path = Field(description="a dataset's name on the Hub, or a local folder")
    configuration: str | None = Field(
        default=None, description="the dataset's configuration, such as wikitext-2-raw-v1"
    )
    split: str = Field(default=UNNAMED, description="the split to read")
    text_column: str = Field(default="text", description="the column with the text")
    prompt_column: str | None = Field(default=None, description="the column with the prompt, instead of a text")
    completion_column: str | None = Field(default=None, description="the column with its completion, the only targets")
    messages_column: str | None = Field(
        default=None, description="the column with a chat, instead of a text: a list of role and content"
    )
    id_column: str | None = Field(default=None, description="the column with the id (None: <split>/<row>)")
    title_column: str | None = Field(default=None, description="the column with the title (None: no title)")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.prompt_column is None) != (self.completion_column is None):
            raise ValueError("prompt_column and completion_column belong together: give both")
        given = ["prompt_column" in self.model_fields_set, "messages_column" in self.model_fields_set]
        if sum(given) + ("text_column" in self.model_fields_set) > 1:
            raise ValueError("text_column, prompt_column and messages_column exclude one another")
        return self

    def open(self) -> Stream:
        """Return the rows in the dataset's order."""
        metadata: Counter[str] = Counter()
        table, revision = self._saved() if self.data_path.is_dir() else self._on_hub()
        return Stream(self._where, revision, parse(self._documents(table, metadata), self._where), metadata)

    def content(self) -> Any:
        """The options, with a local folder's digest instead of its path."""
        here = self.data_path.is_dir()
        return [super().content() | ({"data_path": saved_digest(self.data_path)} if here else {})]

    @property
    def label(self) -> str:
        """The dataset's name."""
        return folder_name(self.data_path.name if self.data_path.is_dir() else str(self.data_path))

    @property
    def _where(self) -> str:
        names = (str(self.data_path), self.configuration, f"split {self.split}")
        return ", ".join(name for name in names if name)

    def _on_hub(self) -> tuple[Any, str | None]:
        check_regular(self.data_path, "data_path")
        if self.data_path.is_file():
            raise BadInput(f"data_path: {self.data_path} is a file; give the folder that `save_to_disk` wrote.")
        if self.data_path.is_absolute() or len(self.data_path.parts) > 2:
            raise BadInput(f"data_path: {self.data_path} is neither a folder nor a dataset's name on the Hub.")
        revision = commit(str(self.data_path), self.revision, WITHOUT_NETWORK)
        options = {"name": self.configuration, "split": self.split, "revision": revision}
        try:
            return streamed(path=str(self.data_path), **options), revision
        except BadInput:  # a ValueError
            raise
        except ValueError as error:  # such as an unknown configuration or split
            raise BadInput(f"{self._where}: {str(error).splitlines()[0].rstrip('.')}.") from None

    def _saved(self) -> tuple[Any, str]:
        revision = require_revision(str(self.data_path), self.revision, saved_digest(self.data_path))
        folder = self._saved_split()
        datasets = library()
        try:
            return datasets.load_from_disk(str(folder)).to_iterable_dataset(), revision
        except Exception as error:  # Arrow's and the operating system's errors have no common type
            raise BadInput(f"{self._where} cannot be read: {error}.") from None

    def _saved_split(self) -> Path:
        """The folder of the split.

        Raises:
            BadInput: If the local folder does not hold the split.
        """
        folder, several = self.data_path, self.data_path / SEVERAL
        if several.is_file():
            splits = read_object(several).get("splits")
            listed = splits if isinstance(splits, list) else []
            if self.split not in listed:
                raise BadInput(f"{folder}: {unknown('split', self.split, map(str, listed))}")
            folder /= self.split
        if not (folder / ONE).is_file():
            raise BadInput(f"{self._where}: {folder} holds no dataset that `save_to_disk` wrote; {ONE} is missing.")
        if not several.is_file() and self.split != (name := read_object(folder / ONE).get("_split") or UNNAMED):
            raise BadInput(f"{self._where}: {folder} holds the split {name} alone; give `split: {name}`.")
        return folder

    def _documents(self, table: Any, metadata: Counter[str]) -> Iterator[Mapping[str, Any]]:
        chosen = {"id": self.id_column, "title": self.title_column, **self._content_columns}
        columns = {key: column for key, column in chosen.items() if column is not None}
        for row, values in enumerate(rows(table, list(columns.values()), self._where)):
            document = {key: values[column] for key, column in columns.items()}
            if lacking := missing(document):
                metadata[f"rows_without_{lacking}"] += 1
                continue
            yield {"id": f"{self.split}/{row}", **document}

    @property
    def _content_columns(self) -> dict[str, str | None]:
        """The columns of a document's content, by its keys."""
        if self.messages_column is not None:
            return {"messages": self.messages_column}
        if self.completion_column is not None:
            return {"prompt": self.prompt_column, "completion": self.completion_column}
        return {"text": self.text_column}


def saved_digest(folder: Path) -> str:
    """A digest of a folder that ``save_to_disk`` wrote: its states, and the names and sizes of all files.

    Raises:
        BadInput: If a folder in it cannot be read, or a file is a pipe or a device.
    """
    try:
        files = sorted(files_below(folder))
        for file in files:
            check_regular(file)
        sizes = [
            (os.fsencode(file.relative_to(folder)).decode(errors="backslashreplace"), file.stat().st_size)
            for file in files
        ]
        return digest([sizes, [sha256_file(file) for file in files if file.name == ONE]], length=64)
    except OSError as error:
        raise BadInput(f"data_path: {error.filename} cannot be read: {error.strerror}.") from None


def library() -> ModuleType:
    """Import ``datasets``, with its log off: errors are raised as well, and reported once."""
    import datasets
    from datasets.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    return datasets


def commit(dataset: str, revision: str | None, without_network: str) -> str | None:
    """Resolve a revision of a dataset on the Hub to its commit.

    Args:
        dataset: The dataset's name.
        revision: A commit, branch or tag; None for the default branch.
        without_network: The remedy if the Hub cannot be reached, for the message.

    Raises:
        BadInput: If the Hub cannot be reached, or there is no such dataset or revision.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return HfApi().dataset_info(dataset, revision=revision, timeout=TIMEOUT).sha
    except RevisionNotFoundError:
        raise BadInput(f"{dataset} has no revision {revision!r}; leave it out for the default.") from None
    except RepositoryNotFoundError:
        raise BadInput(f"there is no folder {dataset}, and no public dataset of that name on the Hub.") from None
    except Exception as error:  # the type depends on the HTTP client
        raise BadInput(f"cannot reach the Hugging Face Hub for {dataset} ({error}). {without_network}") from None


def streamed(**table: Any) -> Any:
    """A table as a stream, which holds few rows in memory; arguments as those of ``datasets.load_dataset``."""
    return library().load_dataset(**table, streaming=True)


def rows(table: Iterable[dict[str, Any]], columns: list[str], where: str) -> Iterator[dict[str, Any]]:
    """Yield some columns of a table row by row.

    Raises:
        BadInput: If a column is missing, or a text is not UTF-8.
    """
    there = getattr(table, "column_names", None) or columns
    missing = set(columns).difference(there)
    if missing:
        raise BadInput(f"{where} has no column {', '.join(sorted(missing))}; it has {', '.join(there)}.")
    read = 0
    try:
        for row in table.select_columns(columns):  # type: ignore[attr-defined]
            yield row
            read += 1
    except UnicodeDecodeError as error:
        raise BadInput(f"{where}: row {read} (counted from 0) or one after it is not UTF-8: {error}.") from None
