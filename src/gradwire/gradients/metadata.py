"""Further columns of the store's tables, chosen by ``grads collect --metadata``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from gradwire.data.shards import Sample
from gradwire.errors import unknown


class Column(NamedTuple):
    """A column: its type, and how it is had from a sample, its position in the data and what is known of its row."""

    type: pa.DataType
    of: Callable[[Sample, int, Mapping[str, Any]], Any]


COLUMNS = {
    "position": Column(pa.int64(), lambda sample, position, fact: position),
    "document": Column(pa.string(), lambda sample, position, fact: document(sample.sample_id)),
    "n_tokens": Column(pa.int64(), lambda sample, position, fact: len(sample.input_ids)),
    "n_valid": Column(pa.int64(), lambda sample, position, fact: fact["n_targets"]),
    "perplexity": Column(pa.float64(), lambda sample, position, fact: _perplexity(fact["loss"])),
}
ALWAYS = ("sample_id", "loss", "n_targets", "norm", "flag", "digest")


def document(sample_id: str) -> str:
    """The document that a sample was cut from: its id without ``#<k>``."""
    stem, mark, number = sample_id.rpartition("#")
    return stem if mark and number.isdecimal() else sample_id


def chosen(names: str) -> list[str]:
    """The further columns of a comma-separated list; those that are always there are left out.

    Raises:
        BadInput: If there is no such column.
    """
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in COLUMNS and name not in ALWAYS:
            raise unknown("column of --metadata", name, [*COLUMNS, *ALWAYS])
    return sorted({name for name in found if name not in ALWAYS})


def schema(names: Iterable[str]) -> list[tuple[str, pa.DataType]]:
    """Their names and types."""
    return [(name, COLUMNS[name].type) for name in names]


def columns(names: Sequence[str], sample: Sample, position: int, fact: Mapping[str, Any]) -> dict[str, Any]:
    """Their values for one sample."""
    return {name: COLUMNS[name].of(sample, position, fact) for name in names}


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None else math.exp(min(loss, 700.0))
