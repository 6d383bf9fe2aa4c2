"""Point-to-point exchange of encodings, with one message per pair of ranks.

Both sides know an encoding's size in advance, unless it depends on the data; only such sizes are sent, before the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.comm.collectives import ops
from gradwire.comm.collectives.group import Ranks
from gradwire.comm.collectives.plan import Sizes


def exchange(
    message: Tensor,
    lengths_out: Sequence[Sequence[int]],
    sizes_out: Sizes,
    sizes_in: Sizes,
    ranks: Ranks,
    purpose: str = "payload",
    *,
    bulk: bool = False,
) -> tuple[Tensor, list[list[int]]]:
    """Send each rank its encodings and receive those from each rank.

    All ranks must agree on whether sizes are sent, so the two tables together cover every encoding of the exchange.

    Args:
        message: The encodings for each rank, in rank order: uint8 vector.
        lengths_out: For each rank, the bytes of its encodings.
        sizes_out: The same as the receivers know them; None where they depend on the data.
        sizes_in: The sizes of incoming encodings that this rank knows; None for the others.
        ranks: The participating ranks.
        purpose: The purpose that the bytes are counted for.
        bulk: See `ops.all_to_all`.

    Returns:
        The encodings from each rank, in rank order: uint8 vector; and for each rank, the bytes of its encodings.
    """
    if any(size is None for sizes in (*sizes_out, *sizes_in) for size in sizes):
        lengths_in = swap_sizes(lengths_out, sizes_out, sizes_in, message.device, ranks, purpose)
    else:
        lengths_in = [[size for size in sizes if size is not None] for sizes in sizes_in]
    totals_out, totals_in = ([sum(row) for row in lengths] for lengths in (lengths_out, lengths_in))
    return ops.all_to_all(message, totals_out, totals_in, ranks.group, purpose, ranks.meter, bulk=bulk), lengths_in


def swap_sizes(
    lengths_out: Sequence[Sequence[int]],
    sizes_out: Sizes,
    sizes_in: Sizes,
    device: torch.device,
    ranks: Ranks,
    purpose: str,
) -> list[list[int]]:
    """Send the lengths that are None in ``sizes_out`` (int64 each), and return ``sizes_in`` with its None filled in."""
    unknown_out = [
        [length for length, size in zip(lengths, sizes, strict=True) if size is None]
        for lengths, sizes in zip(lengths_out, sizes_out, strict=True)
    ]
    table = torch.tensor([length for row in unknown_out for length in row], dtype=torch.int64, device=device)
    received = ops.all_to_all(
        table.view(torch.uint8),
        [8 * len(row) for row in unknown_out],
        [8 * sum(size is None for size in row) for row in sizes_in],
        ranks.group,
        purpose,
        ranks.meter,
    )
    lengths = iter(received.view(torch.int64).tolist())
    return [[next(lengths) if size is None else size for size in row] for row in sizes_in]
