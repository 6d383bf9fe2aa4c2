"""Corpus sources: one file each, with a `Source` class; other packages offer theirs as ``gradwire.sources``.

Modules of sources import heavy packages, such as ``datasets``, inside functions, because the configuration loads them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from gradwire.base.errors import BadInput, unknown
from gradwire.base.files import check_regular
from gradwire.base.plugins import Plugins
from gradwire.base.strict import BOUND
from gradwire.lm.data.document import Document

SOURCES = Plugins("source", "gradwire.lm.data.sources", "gradwire.sources")


class Stream(NamedTuple):
    """A source that has been opened.

    Attributes:
        where: The origin, for messages.
        revision: An exact identifier of the content; None if unknown.
        documents: The documents, read lazily and in a fixed order.
        metadata: Counts for the corpus's record, such as skipped files; complete when the documents have been read.
    """

    where: str
    revision: str | None
    documents: Iterable[Document]
    metadata: Mapping[str, Any] = {}


class Source(BaseModel, ABC):
    """A source of documents; its fields are its options: keys of a ``dataset``, and flags of ``download``.

    A subclass has a docstring, and a field ``data_path`` if it reads a file or a folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: ClassVar[str]
    """The value of ``source``, and the name of the source's file or entry point."""

    size: ClassVar[str | None] = None
    """The size of a corpus too large to read by accident, such as ``about 20 GB``: a limit is then required."""

    revision: str | None = Field(default=None, description="required revision; any other is an error")

    @abstractmethod
    def open(self) -> Stream:
        """Open the stream of documents.

        Raises:
            BadInput: If an option is invalid, the source cannot be read, or `revision` differs from its revision.
        """

    def content(self) -> Any:
        """Settings and digests that the documents depend on, as JSON; corpora of equal content share a folder.

        Default: the options. A source that reads local files uses their digests instead of their paths.

        Raises:
            BadInput: If the source cannot be read.
        """
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def label(self) -> str:
        """The name of the corpus's folder. Default: the source's name."""
        return self.name


def source_class(name: str) -> type[Source]:
    """The class of a source.

    Raises:
        BadInput: If the source is unknown, or its file or entry point holds no such class.
    """
    return SOURCES.find(name, Source)


def build(name: str, options: Mapping[str, Any]) -> Source:
    """Build a source from its name and options.

    Raises:
        BadInput: If the source or an option is unknown, missing or invalid.
    """
    kind = source_class(name)
    for option in options:
        if option not in kind.model_fields:
            raise unknown(f"option of source {name}", option, kind.model_fields)
    try:
        made = kind(**options)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ", ".join([f"source {name}", *([".".join(map(str, problem["loc"]))] if problem["loc"] else [])])
        message = problem["msg"].removeprefix("Value error, ").replace(BOUND, "must be ")
        raise BadInput(f"{where}: {message}.") from None
    for key in kind.model_fields:
        if isinstance(path := getattr(made, key), Path):
            check_regular(path, key)
    return made


def options() -> dict[str, dict[str, FieldInfo]]:
    """The options of all sources: for each, its field in every source that has it."""
    fields: dict[str, dict[str, FieldInfo]] = {}
    for name in SOURCES.available():
        for option, field in source_class(name).model_fields.items():
            fields.setdefault(option, {})[name] = field
    return fields


def meaning(fields: Mapping[str, FieldInfo]) -> str:
    """Descriptions of an option in each source that has it: ``json: the corpus file; text: a folder``."""
    by_text: dict[str, list[str]] = {}
    for name, field in fields.items():
        by_text.setdefault(field.description or "", []).append(name)
    if len(by_text) == 1 and len(fields) == len(SOURCES.available()):
        return next(iter(by_text))
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in by_text.items())


def require_revision(name: str, wanted: str | None, actual: str) -> str:
    """Return ``actual``, the revision of the source.

    Raises:
        BadInput: If another one is wanted.
    """
    if wanted not in (None, actual):
        raise BadInput(f"--revision is {wanted}, but {name} is at revision {actual}.")
    return actual


def folder_name(text: str) -> str:
    """Turn a file's or a dataset's name into the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text).strip("_") or "_"


def modules(name: str) -> list[str]:
    """The modules that a source brings along; no import statement leads to them. Empty for other packages' sources."""
    return [f"{SOURCES.package}.{name}"] if name in SOURCES.built_in() else []
