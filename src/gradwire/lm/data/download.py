"""``gradwire download``: download or extract a corpus as a JSON array of id, title and text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from gradwire.base.errors import BadInput
from gradwire.base.files import sha256_file, write_json
from gradwire.base.flags import POSITIVE, output_file


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags; the options of the sources define theirs."""
    from gradwire.lm.data.sources import SOURCES, meaning, options

    parser.add_argument("--source", choices=SOURCES.available(), default="pydocs", help="where the documents come from")
    parser.add_argument("--output", type=output_file, required=True, metavar="FILE", help="the corpus file to write")
    parser.add_argument(
        "--max_mb",
        type=POSITIVE,
        metavar="N",
        help="maximum size of the file in MB (10^6 bytes); None: no limit",
    )
    for option, fields in options().items():
        kinds = {kind for field in fields.values() for kind in (field.annotation, *get_args(field.annotation))}
        description = meaning(fields).replace("%", "%%")
        if bool in kinds:
            parser.add_argument(f"--{option}", action=argparse.BooleanOptionalAction, help=description)
        else:
            kind = Path if Path in kinds else str
            parser.add_argument(f"--{option}", type=kind, metavar="PATH" if kind is Path else "VALUE", help=description)


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sources' options that were given as flags.

    Raises:
        BadInput: If one is not an option of the source.
    """
    from gradwire.lm.data.sources import options

    given = {option: getattr(args, option) for option in options() if getattr(args, option) is not None}
    for option in given:
        if args.source not in (takers := options()[option]):
            raise BadInput(f"--{option} works with --source {' or '.join(takers)} only, not with {args.source}.")
    return given


def beside(args: argparse.Namespace) -> Path:
    """The folder for a failure record."""
    return args.output.parent


def main(args: argparse.Namespace) -> None:
    """Write the corpus and, next to it, its origin in ``<name>.source.json``."""
    from gradwire.lm.data import corpus, sources

    source = sources.build(args.source, given_options(args))
    if source.size and args.max_mb is None:
        raise BadInput(f"--source {args.source} is {source.size}; limit its size with --max_mb N.")
    stream = source.open()
    documents = corpus.distinct(stream.documents, stream.where)
    written = corpus.write(args.output, documents, args.max_mb and int(args.max_mb * 1e6))
    write_json(
        args.output.with_suffix(".source.json"),
        {
            "source": args.source,
            "options": source.model_dump(mode="json", exclude_unset=True),
            "revision": stream.revision,
            "max_mb": args.max_mb,
            "documents": written.documents,
            "bytes": written.bytes,
            "sha256": sha256_file(args.output),
            "metadata": dict(stream.metadata),
        },
    )
    if written.cut:
        print(f"gradwire download: stopped at --max_mb {args.max_mb:g}; the source has more.", file=sys.stderr)
    print(f"{args.output}: {written.documents} documents, {written.bytes / 1e6:.2f} MB{shown(stream.metadata)}")


def shown(metadata: Mapping[str, Any]) -> str:
    """The counts of a stream as part of a line: ``; 12 files, 12 files in utf-8``."""
    counted = [f"{value} {name.replace('_', ' ')}" for name, value in metadata.items() if value]
    return f"; {', '.join(counted)}" if counted else ""
