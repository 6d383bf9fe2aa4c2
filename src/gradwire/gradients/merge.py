"""Merging the ranks' blocks: every sample once, in the order of the data, its duplicates checked against each other."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from gradwire.errors import BadInput, CheckFailed
from gradwire.gradients import store
from gradwire.gradients.store import Block

TOLERANCE = 1e-4  # of two computations of one row: float32 sums in another order, times a wide margin
NAMED = 3  # ids that an error names


class Merged(NamedTuple):
    """A block of every sample, how many rows repeated one of them, and the largest deviation among those."""

    block: Block
    duplicates: int
    deviation: float


def read_rank(folder: Path, dim: int) -> Block:
    """A rank's whole block.

    Raises:
        BadInput: If it is missing, damaged or of another width.
    """
    names = store.all_names(folder)
    if not names.exist():
        raise BadInput(
            f"{folder} is missing or not complete; run `gradwire grads collect` again, it goes on where it stopped."
        )
    block = store.read(names)
    if block.rows.shape[1] != dim:
        raise BadInput(f"{names.rows} has rows of {block.rows.shape[1]} columns, not {dim}.")
    return block


def merge(ranks: Sequence[Block], ids: Sequence[str]) -> Merged:
    """Merge the ranks' blocks.

    A padded sampler gives some samples to two ranks; such rows must agree, and the first one is kept.

    Args:
        ranks: A block per rank.
        ids: Every sample's id, in the order wanted.

    Raises:
        BadInput: If a sample has no row, or a row no sample.
        CheckFailed: If two rows of one sample disagree.
    """
    together = store.concatenated(ranks)
    first: dict[str, int] = {}
    deviation = 0.0
    for position, id_ in enumerate(together.ids):
        if first.setdefault(id_, position) == position:
            continue
        apart = relative_deviation(together.rows[position], together.rows[first[id_]])
        if not apart <= TOLERANCE:
            raise CheckFailed(f"two rows of sample {id_!r} differ by {apart:.1e} of the row's norm; collect anew.")
        deviation = max(deviation, apart)
    _check_complete(first.keys(), ids)
    block = store.taken(together, [first[id_] for id_ in ids])
    return Merged(block, len(together.ids) - len(first), deviation)


def relative_deviation(row: Tensor, other: Tensor) -> float:
    """The norm of the difference of two rows, relative to the larger of theirs; 0 for two zero rows."""
    scale = max(float(row.norm()), float(other.norm()))
    return float((row - other).norm()) / scale if scale else 0.0


def _check_complete(found: Set[str], ids: Sequence[str]) -> None:
    missing, strange = set(ids) - found, found - set(ids)
    if missing:
        raise BadInput(f"the ranks have no row for sample {named(missing)}; collect anew.")
    if strange:
        raise BadInput(f"the ranks have rows for sample {named(strange)}, which the data have not; collect anew.")


def named(ids: Set[str]) -> str:
    """Some of the ids, and how many there are."""
    some = ", ".join(map(repr, sorted(ids)[:NAMED]))
    return f"{some} ({len(ids)} in all)"
