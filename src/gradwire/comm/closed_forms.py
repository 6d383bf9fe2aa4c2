"""Closed forms of the bytes that bandwidth-optimal collectives send; the only such formulas of the package.

Totals are over all ranks, so that they are integers. A single rank's bytes assume a buffer cut into `share` s; they add
up to the total exactly, also if the number of ranks does not divide the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

N = TypeVar("N", int, float)

FLOAT32_BYTES = 4
PASSES = {"reduce_scatter": 1, "all_gather": 1, "all_to_all": 1, "all_reduce": 2}
"""Times that a collective sends its buffer to or from ``world - 1`` ranks."""


def total_bytes(op: str, nbytes: N, world: int) -> N:
    """Return the bytes over all ranks of a collective.

    Args:
        op: A key of `PASSES`.
        nbytes: Bytes of the buffer: of a reduction's input on each rank, or of all that an all-gather delivers, or of
            what a rank has for all ranks in an all-to-all.
        world: Number of ranks.
    """
    return PASSES[op] * (world - 1) * nbytes


def raw_bytes(op: str, numel: int, world: int) -> int:
    """Return the bytes over all ranks of a float32 collective on a buffer of ``numel`` elements."""
    return total_bytes(op, FLOAT32_BYTES * numel, world)


def share(amount: int, world: int, rank: int) -> int:
    """Return the size of ``rank``'s part when ``amount`` is cut as evenly as integers allow."""
    return amount * (rank + 1) // world - amount * rank // world


def rank_bytes(op: str, nbytes: int, mine: int, world: int) -> int:
    """Return the bytes that one rank, whose part of the buffer has ``mine`` bytes, sends in a reduction.

    It sends the other parts to their owners, and in an all-reduce the mean of its part to each of them.
    """
    return nbytes - mine + ((world - 1) * mine if op == "all_reduce" else 0)


class ByLink(NamedTuple):
    """Bytes over all ranks, inside islands and between them."""

    inside: int
    between: int


def unhooked_by_link(numel: int, world: int, islands: int) -> ByLink:
    """Return the bytes of the float32 reductions of one optimizer step under ``hsdp``.

    Each island reduce-scatters all elements, then each shard is all-reduced by the ranks that hold it.

    Args:
        numel: Trainable elements of the model, or `Strategy.reduced_numel` to include padding.
        world: Number of ranks.
        islands: Number of islands.
    """
    return ByLink(
        islands * raw_bytes("reduce_scatter", numel, world // islands), raw_bytes("all_reduce", numel, islands)
    )


def parameters_unhooked(
    kind: str,
    sizes: Sequence[int],
    world: int,
    micro_batches: int = 1,
    *,
    backwards: int = 1,
    evaluated: bool = False,
    islands: int = 1,
) -> int | None:
    """Return the bytes over all ranks of the float32 all-gathers of parameters in one optimizer step.

    For each micro-batch FSDP gathers a block in the forward pass and again in each backward pass. Parameters outside
    the blocks stay gathered from the forward pass to the first backward pass, and from an evaluation to the next step.

    Args:
        kind: The strategy's collective.
        sizes: Elements outside the blocks, then of each block, frozen ones included, as from `block_sizes`.
        world: Number of ranks.
        micro_batches: Forward passes of the step.
        backwards: Backward passes over a micro-batch.
        evaluated: Whether a forward pass without a backward pass came between the previous step and this one.
        islands: Number of islands that hold the model in shards; each gathers by itself.

    Returns:
        The bytes; None for replicas, which gather nothing.
    """
    if kind == "all_reduce":
        return None
    first, *blocks = sizes
    gathered = micro_batches * (backwards * first + (1 + backwards) * sum(blocks)) - evaluated * first
    return islands * raw_bytes("all_gather", gathered, world // islands)
