"""English Wikipedia of 1 November 2023, streamed from the Hugging Face Hub; only what is read is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradwire.data import corpus
from gradwire.data.sources import Source
from gradwire.errors import BadInput

DATASET = "wikimedia/wikipedia"
CONFIG = "20231101.en"
REVISION = "b04c8d1ceb2f5cd4588862100d08de323dccfbaa"
COLUMNS = ["id", "title", "text"]
TIMEOUT = 10  # seconds to wait for the Hub

WITHOUT_NETWORK = (
    "Check the network (and unset HF_HUB_OFFLINE), pass a Parquet file of the dataset with --data_path FILE, or use "
    "--source pydocs, which needs no network."
)


def source(data_path: Path | None, revision: str | None) -> Source:
    """Return the articles in the dataset's order.

    Args:
        data_path: A Parquet file with the dataset's columns, read instead of the Hub's.
        revision: A commit, branch or tag of the dataset; default: the pinned commit.

    Returns:
        The articles, and the commit of the revision (None for a local file).

    Raises:
        BadInput: If `datasets` is not installed, the Hub cannot be reached, the file is not Parquet, or a column is
            missing.
    """
    if data_path is None:
        commit = _resolve(revision or REVISION)
        name = f"{DATASET} {CONFIG}"
        return Source(name, commit, corpus.parse(_rows(name, path=DATASET, name=CONFIG, revision=commit), name))
    if not data_path.is_file():
        raise BadInput(f"--data_path {data_path} is not a file.")
    return Source(str(data_path), None, corpus.parse(_rows_of(data_path), str(data_path)))


def _resolve(revision: str) -> str | None:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RevisionNotFoundError
    except ImportError:
        raise _not_installed() from None
    try:
        return HfApi().dataset_info(DATASET, revision=revision, timeout=TIMEOUT).sha
    except RevisionNotFoundError:
        raise BadInput(f"{DATASET} has no revision {revision!r}; the default is {REVISION}.") from None
    except Exception as error:  # the type depends on the HTTP client
        raise BadInput(f"cannot reach the Hugging Face Hub for {DATASET} ({error}). {WITHOUT_NETWORK}") from None


def _rows_of(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow

    try:
        yield from _rows(str(file), path="parquet", data_files=str(file))
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).rstrip(".")
        raise BadInput(f"--data_path {file} cannot be read as a Parquet file: {reason}.") from None


def _rows(table_name: str, **where: Any) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset
        from datasets.utils import logging
    except ImportError:
        raise _not_installed() from None
    logging.set_verbosity(logging.CRITICAL)  # errors are raised as well; report them once
    table = load_dataset(**where, split="train", streaming=True)
    missing = set(COLUMNS).difference(table.column_names or COLUMNS)
    if missing:
        raise BadInput(f"{table_name} has no column {', '.join(sorted(missing))}.")
    yield from table.select_columns(COLUMNS)


def _not_installed() -> BadInput:
    return BadInput("--source wikipedia needs the package `datasets`: pip install 'gradwire[wikipedia]'.")
