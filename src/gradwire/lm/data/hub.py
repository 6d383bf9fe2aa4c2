"""Tables of the package ``datasets``, streamed from the Hugging Face Hub or read from disk; an optional dependency."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from gradwire.base.errors import BadInput

TIMEOUT = 10  # seconds to wait for the Hub


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
        without_network: What to do if the Hub cannot be reached, for the message.

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
