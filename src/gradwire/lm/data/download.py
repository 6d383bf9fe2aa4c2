"""``gradwire download``: download or extract a corpus as a JSON array of id, title and text."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from gradwire.base.errors import BadInput
from gradwire.base.files import sha256_file, write_json
from gradwire.base.flags import POSITIVE, output_file
from gradwire.base.strict import Strict
from gradwire.lm.data.sources import SOURCES, build, meaning
from gradwire.lm.data.sources import options as options_of_sources


class Download(Strict):
    """Flags of ``gradwire download`` for any source."""

    source: Literal[tuple(SOURCES.available())] = Field(  # type: ignore[valid-type]
        "pydocs", description="where the documents come from"
    )
    output: Annotated[Path, output_file] = Field(description="the corpus file to write")
    max_mb: Annotated[float, POSITIVE] | None = Field(
        None, description="maximum size of the file in MB (10^6 bytes); None: no limit"
    )


def _flag(fields: Mapping[str, FieldInfo]) -> Any:
    """The type and the field of an option that several sources may have."""
    kinds = {kind for field in fields.values() for kind in (field.annotation, *get_args(field.annotation))}
    kind = bool if bool in kinds else Path if Path in kinds else str
    return kind | None, Field(None, description=meaning(fields))


FLAGS = {option: _flag(fields) for option, fields in options_of_sources().items()}
Options: type[Download] = create_model("Options", __base__=Download, **FLAGS)


def given_options(options: Download) -> dict[str, Any]:
    """The options of the source that were given as flags.

    Raises:
        BadInput: If one is not an option of the source.
    """
    given = {option: getattr(options, option) for option in FLAGS if getattr(options, option) is not None}
    for option in given:
        if options.source not in (takers := options_of_sources()[option]):
            raise BadInput(f"--{option} works with --source {' or '.join(takers)} only, not with {options.source}.")
    return given


def output_dir(options: Download) -> Path:
    """The folder for a failure record."""
    return options.output.parent


def main(options: Download) -> None:
    """Write the corpus and, next to it, its origin in ``<name>.source.json``."""
    from gradwire.lm.data import corpus
    from gradwire.lm.data.document import distinct

    source = build(options.source, given_options(options))
    if source.size and options.max_mb is None:
        raise BadInput(f"--source {options.source} is {source.size}; limit its size with --max_mb N.")
    stream = source.open()
    documents = distinct(stream.documents, stream.where)
    written = corpus.write(options.output, documents, None if options.max_mb is None else int(options.max_mb * 1e6))
    write_json(
        options.output.with_suffix(".source.json"),
        {
            "source": options.source,
            "options": source.model_dump(mode="json", exclude_unset=True),
            "revision": stream.revision,
            "max_mb": options.max_mb,
            "documents": written.documents,
            "bytes": written.bytes,
            "sha256": sha256_file(options.output),
            "metadata": dict(stream.metadata),
        },
    )
    if written.cut:
        print(f"gradwire download: stopped at --max_mb {options.max_mb:g}; the source has more.", file=sys.stderr)
    print(f"{options.output}: {written.documents} documents, {written.bytes / 1e6:.2f} MB{shown(stream.metadata)}")


def shown(metadata: Mapping[str, Any]) -> str:
    """The counts of a stream as part of a line: ``; 12 files, 12 files in utf-8``."""
    counted = [f"{value} {name.replace('_', ' ')}" for name, value in metadata.items() if value]
    return f"; {', '.join(counted)}" if counted else ""
