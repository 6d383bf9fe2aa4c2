"""``gradwire download``: download or extract a corpus as a JSON array of id, title and text."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from gradwire.errors import BadInput
from gradwire.files import sha256_file, write_json
from gradwire.flags import POSITIVE, output_file

SOURCES = {"pydocs": "pydocs", "wikipedia": "wikipedia", "json": "json_file"}  # name -> module of data/sources


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument(
        "--source", choices=sorted(SOURCES), default="pydocs", help="pydocs needs no network; json takes --data_path"
    )
    parser.add_argument("--output", type=output_file, required=True, metavar="FILE", help="the corpus file to write")
    parser.add_argument(
        "--max_mb",
        type=POSITIVE,
        metavar="N",
        help="maximum size of the file in MB (10^6 bytes); None: no limit",
    )
    parser.add_argument(
        "--revision",
        metavar="R",
        help="required revision; any other is an error. wikipedia: a commit, branch or tag (None: a pinned commit); "
        "pydocs: the Python version; json: the file's SHA-256",
    )
    parser.add_argument(
        "--data_path",
        type=Path,
        metavar="FILE",
        help="json: the corpus file, a JSON array or .jsonl; wikipedia: a Parquet file to read instead of the Hub's",
    )
    parser.add_argument(
        "--id_from",
        metavar="NAME",
        help="json: the key of a document's id, or an entry point of the group gradwire.sample_ids (None: id)",
    )


def beside(args: argparse.Namespace) -> Path:
    """The folder for a failure record."""
    return args.output.parent


def main(args: argparse.Namespace) -> None:
    """Write the corpus and, next to it, its origin in ``<name>.source.json``."""
    from gradwire.data import corpus

    if args.source == "wikipedia" and args.max_mb is None:
        raise BadInput("--source wikipedia is about 20 GB; limit its size with --max_mb N.")
    module = importlib.import_module(f"gradwire.data.sources.{SOURCES[args.source]}")
    if args.id_from and args.source != "json":
        raise BadInput(f"--id_from {args.id_from} works with --source json only.")
    source = module.source(args.data_path, args.revision, *([args.id_from] if args.id_from else []))
    documents = corpus.distinct(source.documents, source.name)
    written = corpus.write(args.output, documents, args.max_mb and int(args.max_mb * 1e6))
    write_json(
        args.output.with_suffix(".source.json"),
        {
            "source": args.source,
            "revision": source.revision,
            "max_mb": args.max_mb,
            "documents": written.documents,
            "bytes": written.bytes,
            "sha256": sha256_file(args.output),
        },
    )
    if written.cut:
        print(f"gradwire download: stopped at --max_mb {args.max_mb:g}; the source has more.", file=sys.stderr)
    print(f"{args.output}: {written.documents} documents, {written.bytes / 1e6:.2f} MB")
