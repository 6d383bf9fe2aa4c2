"""Additional columns of the store's tables, selected by ``grads collect --metadata``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from gradwire.base.errors import unknown
from gradwire.lm.data.shards import Sample


class Column(NamedTuple):
    """A column: its type, and a function of a sample, its position in the data and its row's other columns."""

    type: pa.DataType
    of: Callable[[Sample, int, Mapping[str, Any]], Any]


COLUMNS = {
    "position": Column(pa.int64(), lambda sample, position, fact: position),
    "document": Column(pa.string(), lambda sample, position, fact: document(sample.sample_id)),
    "n_tokens": Column(pa.int64(), lambda sample, position, fact: len(sample.input_ids)),
    "n_valid": Column(pa.int64(), lambda sample, position, fact: fact["n_targets"]),
    "perplexity": Column(pa.float64(), lambda sample, position, fact: _perplexity(sample, fact["loss"])),
}
ALWAYS = ("sample_id", "loss", "n_targets", "norm", "flag", "digest")


def document(sample_id: str) -> str:
    """Return the id of a sample's document: the sample id without ``#<k>``."""
    stem, mark, number = sample_id.rpartition("#")
    return stem if mark and number.isdecimal() else sample_id


def chosen(names: str) -> list[str]:
    """Parse a comma-separated list of additional columns, without those that are always present.

    Raises:
        BadInput: If a column is unknown.
    """
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in COLUMNS and name not in ALWAYS:
            raise unknown("column of --metadata", name, [*COLUMNS, *ALWAYS])
    return sorted({name for name in found if name not in ALWAYS})


def schema(names: Iterable[str]) -> list[tuple[str, pa.DataType]]:
    """Return the names and types of additional columns."""
    return [(name, COLUMNS[name].type) for name in names]


def columns(names: Sequence[str], sample: Sample, position: int, fact: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of additional columns for one sample."""
    return {name: COLUMNS[name].of(sample, position, fact) for name in names}


def _perplexity(sample: Sample, loss: float | None) -> float | None:
    return None if loss is None or sample.weights is not None else math.exp(min(loss, 700.0))
